"""WebSocket transport of the Responses API (`/v1/responses`).

Reading order: `frames`, `streams`, `notifications`, `connection`.
"""
