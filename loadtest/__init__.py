"""Drive many multi-turn chats that share a system prompt, and report what their users would have felt.

`python -m loadtest --url http://127.0.0.1:8000 --users 16 --turns 5`. Speaks HTTP and SSE only and imports nothing of
the server, so the same script measures any OpenAI-compatible backend.

    scenario.py   what the users say            client.py   one streamed turn, timed
    runner.py     users x turns, with progress  report.py   figures, JSON, plot
    gateway/      what the gateway itself costs per token, without a model: `python -m loadtest.gateway`
    peers/        the same offline work through other engines
"""
