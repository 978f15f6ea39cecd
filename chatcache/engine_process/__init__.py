"""The engine in a thread or a supervised child process, with one client interface for both.

The gateway must not share objects with the engine, and a crash of the engine must not close the gateway's connections.
One loop (`loop`) drives the engine: it reads commands and sends notices, through a thread's queue or a child's socket.
When a child process ends, its requests are resumed by the next one (`recovery`).

Reading order: `protocol` (commands, notices and their frames), `loop`, `client` (event logs and pending calls),
`threaded`, `worker` (entry point of the child), `process` (the supervised child), `recovery`.
"""
