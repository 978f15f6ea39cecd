"""Studies: the figures of the vLLM paper and the questions around them, answered by one command.

`python -m loadtest.studies` (or `make studies`) runs the real engine, with its scheduler, queue, strategies and page
pool. In simulated studies a virtual clock and a step cost model replace the model; real studies run kernels and models
on this machine. The paper: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, arXiv 2309.06180.

Reading order: `reservations` (the memory management that pages are compared with), `cost` (seconds of a step),
`simulate` (an engine on a virtual clock), `machine` (an engine on this machine), `published` (the paper's values),
`results` and `report` (rows, panels, the files), then the studies: `memory` (Figures 2 and 13), `rates` (12, 14, 16,
17), `sharing` (15), `kernels` (18a, 19), `batching` (18b, paging or scheduling, lengths apart, chunk budgets),
`local_user`, `tails` (shared last pages), `recorded` (traces).
"""
