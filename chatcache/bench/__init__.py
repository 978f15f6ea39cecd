"""Measure and report speed, for `chatcache bench`, `kernels/bench` and `loadtest`.

A speed is reported next to a limit that was measured in the same run (read bandwidth over a buffer as large as the
weights, matrix multiplication rate in their dtype), so that the ratio shows how close it is. Read `report` first (a
figure, its limit and its goal; no dependency but numpy), then `device` (timing and limits of a device), `drivers` (run
batches through an engine), `contention` (the same next to busy processes), and the benchmarks `engine_bench` and
`kv_bench`. `drivers` also makes models with random
weights.
"""
