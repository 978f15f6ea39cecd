"""Execute a plan: the only room that touches tensors.

`load.py` turns a folder into a `Runner`; `runner.py` applies a `StepPlan` in its documented order and answers with
candidates. In between: `folder.py` and `weights.py` (what lies on disk, checked before it is used), `arch.py` and
`rope.py` (what the config means), `decoder.py` (the fast family), `hf.py` (any other transformers model, unchanged),
`attention.py` (the backends over `chatcache_kernels`), `tables.py` (one page-table row per branch slot), `sampler.py`
and `noise.py` (logits to candidates). It knows the plan as data and nothing of the engine.

A GPU is kept busy: `launch` returns before a step is done, `streams.py` says what runs behind what and what beside it
(`swaps.py`), `eager.py` runs any step (in `halving.py`'s halves where memory is short), and plain decode steps lie in
buffers that never move (`static.py`, `room.py`, `plain.py`), captured once and replayed (`graphs.py`). `memory.py`
leaves room for all that before pages take the rest; `device_errors.py` knows a device that is lost.
"""
