"""Data types that all packages share: requests, events, step plans, actions and statistics.

They are frozen data, and those that cross process boundaries do so unchanged. Reading order: `request`, `events`,
`actions` (decoding strategies to scheduler), `plan` (scheduler to model runner), `queue_limits`, `stats`.
"""
