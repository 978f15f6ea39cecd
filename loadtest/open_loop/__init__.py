"""Open-loop load: requests are sent at times drawn in advance, whatever the server does.

Any server with `/v1/completions` can be measured. Read `traces` (recorded requests), `workload` (the plan of a run:
when each request is sent, with which tokens), `server` (what a server accepts, and one streamed completion),
`generator` (sends a plan), `report` (metrics, table, JSON, figure) and `command` (the command line).
"""
