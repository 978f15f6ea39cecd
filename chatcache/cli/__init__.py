"""The `chatcache` command.

`main` reads the settings file and runs a command. Every flag is defined in `options`. Read `serve` (flags to settings)
and `server` (socket, engine process, uvicorn, signals) first, then `port_check`, `chat`,
`bench`, `db`, `keys`, `redis_acl` and `doctor`.
"""
