"""Execute a plan: the only room that touches tensors.

`load.py` turns a folder into a `Runner`; `runner.py` applies a `StepPlan` in its documented order and answers with
candidates. In between: `folder.py` and `weights.py` (what lies on disk, checked before it is used), `arch.py` and
`rope.py` (what the config means), `decoder.py` (the fast family), `hf.py` (any other transformers model, unchanged),
`attention.py` (the backends over `chatcache_kernels`), `tables.py` (one page-table row per branch slot), `sampler.py`
and `noise.py` (logits to candidates). It knows the plan as data and nothing of the engine.
"""
