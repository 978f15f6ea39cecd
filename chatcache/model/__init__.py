"""Load a model and execute step plans on it: the only package that touches tensors.

`loading.loader` turns a model folder into a `runner.Runner`, which applies each `StepPlan` to the page tables and the
KV pages, runs the network and returns the sampled tokens. The package depends on the plan (`chatcache.types.plan`) and
on `chatcache_kernels`, and knows nothing of the engine.

Reading order: `runner`, `eager`, `page_tables`, `attention`, `decoder`, `linear`, `sampling.sampler`, `sampling.ops`,
`streams`; then, for GPUs, `static_steps`, `cuda_graphs`, `sampling.device_sampler`;
then `loading.loader` and the rest.
"""
