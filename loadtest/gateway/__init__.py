"""What the gateway itself costs: `python -m loadtest.gateway`, no model, Linux only.

    ticks.py     the clock that the processes share: when each tick was
    clock.py     an engine that emits a token to every stream by it
    served.py    the processes that are measured: `chatcache serve` over that engine, and a bare uvicorn write loop
    readers.py   a process of clients: opens the streams, writes down what arrives when
    wires.py     what opens a stream on each transport
    figures.py   CPU time, memory and latency as numbers

    core 0                                  core 1
    [ gateway | bare write loop ]  <-----  [ clock engine ]  [ readers ]

Each token's text is the number of the tick that emitted it, and the engine notes each tick's time in a shared file, so
a reader knows how long a token took from the engine's hand to its own: over the engine's pipe, through the gateway
and a socket. CPU time is the process's own (user + system) over the tokens that arrived in the same window.
"""
