"""The HTTP server.

OpenAI-compatible routes, SSE, the Responses WebSocket, metrics and the chat page.

`app.create_app(config, engine, load_tokenizer, model_name)` builds a Starlette application over an `EngineClient`. The
application starts at once and responds with 503 `model_loading` until the tokenizer is loaded and the engine is ready.
`routes.ROUTES` lists all routes with their permissions and types; `docs/` describes them for clients.

Reading order: app, routes, routing, context, middleware, errors, auth, limits, schemas, api, responses, websocket,
mcp, openapi, health, metrics, static, json_codec, uvicorn_limits.
"""
