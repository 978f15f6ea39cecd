"""Simulated clusters: `python -m loadtest.scale simulate` compares rules that choose a worker for each request.

`traffic` draws conversations or reads a recorded trace, `cluster` runs workers, caches and gateways on a virtual clock,
`policies` has the rules, ours being the product's own `chatcache.cluster.routing`, and `report` the table and figure.
"""
