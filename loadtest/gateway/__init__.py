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

Where a token's time goes, measured on two virtual cores of a Xeon that others used as well (`results/`): with 2,000
chat streams at 10 tokens/s a token costs 46 us of CPU, 15 of them the kernel's, and the bare loop's 22 us, 11 of them
the kernel's. `strace` sees one `write` per token and nothing else that grows with them; half of the kernel's time is
the loopback waking the reader. Our own path, from the engine's event to the ASGI message, takes 8 us where 200 streams
fit the caches and 16 us with 2,000 (Responses: 15 us with 200; its log has a writer and readers, so two tasks wake).
A goal of 10 us in all is therefore out of reach for one `write` per token here: no program below uvicorn spends less.

What was cut, from 122 us: a task, a timer and a future per chunk for keep-alive; a cancel scope per send; a dictionary
and its JSON per chunk; a histogram's locks; frozen dataclasses per delta; a queue, a task and a timeout per coalesced
delta; walks of the cycle collector through everything that streams keep.

`waited` in the table is time in which the process could have run and its core did something else: with more than a
per cent of it, latencies are not the gateway's. `chrt -f 1` in front keeps a busy machine out.
"""
