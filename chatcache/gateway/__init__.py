"""The wire: OpenAI-shaped HTTP and SSE, the Responses WebSocket, health, metrics and the static page.

`app.create_app(config, engine, load_tokenizer, model_name)` builds the Starlette application:

    create_app(
        config: ServerConfig,                     # limits, keys, hosts; config.db is opened when `store` is None
        engine: EngineClient,                     # wherever it runs; the gateway never starts or stops it
        load_tokenizer: Callable[[], Tokenizer],  # called once, in a thread, at the start; may take long or raise
        model_name: str,                          # the served name; "": the engine's own
        *,
        store: ConversationStore | None = None,   # tests and `--redis` pass their own; closed at shutdown
    ) -> Starlette

The app listens at once and answers 503 `model_loading` until the tokenizer is there and `engine.health().ready`.
`docs/` describes every route and frame.
"""
