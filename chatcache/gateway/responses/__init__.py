"""The Responses API without its transports: create, run, log, resume and store responses.

Reading order: `create`, `run`, `events`, `event_log`, `objects`, `state`, `registry`, `steering`, `pending_saves`,
`http`.
"""
