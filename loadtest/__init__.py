"""Load tests. `python -m loadtest --url http://127.0.0.1:8000` runs multi-turn chats; with `--rate`, open-loop load.

They measure any OpenAI-compatible server: they use HTTP and SSE, and import only the report module of
`chatcache.bench`. Read `chats` (texts and requests), `client` (one streamed turn, timed), and `report` (summary, JSON,
plot). `loadtest.open_loop` sends requests at planned times, with the lengths of `lengths`. `loadtest.gateway` measures
the cost of the gateway per token without a model; `loadtest.attacks` the latency of other clients under attack;
`loadtest.peers` runs the same offline work in other engines.
"""
