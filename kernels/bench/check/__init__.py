"""The stages of `gpu_check.py`; each runs in its own process and stores its figures at once.

Read `stages` (the list of stages, and running one with a time limit) and `context` (what a stage gets: a device, a
size, and a file for figures). `workload` makes random keys and values for the stages in `attention` and `tune`. The
other stages: `run_tests` (in a dry run with `emulated_device`), `limits`, `small_kernels`, `sampling`, `planning`,
`model`, `offline`. Figures, timing and limits come from `chatcache.bench`.
"""
