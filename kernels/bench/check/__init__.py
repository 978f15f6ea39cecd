"""The stages of `gpu_check.py`. Each runs in a process of its own and writes figures as they come.

stages.py     which stages there are, and running one with a time limit
context.py    what a stage is given: a device, sizes, and somewhere to put figures
figures.py    one figure, its limit, its goal; the table. goals.py: figures made of two stages'
timing.py     seconds of device work: CUDA graph replays over rotating inputs
workload.py   rows of random keys in shuffled pages, and trees of them
suite.py      (a) the tests
ceilings.py   (b) what the device can do at best
decode.py     (c) paged decode beside bandwidth, a contiguous table, shared prefixes, torch SDPA
prefill.py    (c) prefill attention beside the matmul rate and torch SDPA
small.py      (c) rotation, norms, activation, copies, swaps
sampling.py   (c) from logits to candidates on the host
model.py      (d) whole steps of random-weight models beside floors
offline.py    (d) a queue of 256 requests beside floors
peer.py       (d) the same through transformers' continuous batching
profile.py    (d) where a step's time goes
tune.py       every launch configuration of attention, ranked; not part of the nine minutes
in_order.py   a runner held back, to compare with
machine.py    what was measured on
"""
