"""The inference engine: plan, launch, collect and commit steps, and emit events.

The page pool, the scheduler and the decoding strategies do not depend on each other; the engine connects them. It
guarantees that every accepted request ends in exactly one terminal event, whatever fails.

Reading order: `protocols` (the runner below the engine and the client above it), `engine` (the step loop), `pipeline`
(launched steps and their results), `admission` (validation of requests), `stats`, `invariants`.

Cost of a step without the runner (4,096 sampling requests that each draw one token, profiled): about 30 % decoding
strategies, 30 % events, 25 % applying the strategies' actions, 4 % plan and commit (see `chatcache bench kv`). About a
fifth of all is garbage collection; therefore objects that are created for every token are structs with `gc=False`.
"""
