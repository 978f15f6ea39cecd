"""The bus: an engine that lives elsewhere, held as if it were here.

Why: the gateway must never touch engine objects, and a crash of the engine must not take the sockets with it. One loop
(`loop.py`) drives an engine from commands to notices; what carries them is a thread's queue or a child's pipe.

    messages.py     commands and notices; faults.py errors among them
    codec.py        their frames (4 bytes of length, then msgpack)
    log.py          one append-only event log per request, read by cursor
    loop.py         the loop around an engine: read commands -> step -> send notices; sleeps when idle
    switchboard.py  the client's half: calls awaiting answers, logs of running requests, the last health heard
    told.py         what a running request was told, so that another engine can go on with it
    survivor.py     one request that outlives its engines
    survivors.py    all of them, and which of them killed one
    supervision.py  when a child is given up, and when another one is started
    inproc.py       ThreadedEngine: the loop in a thread of this process
    child.py        one child process and its socket
    pipe.py         EngineProcess: the loop in a supervised child process
    worker.py       the child's entry point
"""
