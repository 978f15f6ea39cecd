"""Measure the cost of the gateway per streamed token (`python -m loadtest.gateway`, Linux).

    core 0                                  core 1
    [ gateway | bare write loop ]  <-----  [ clock engine ]  [ clients ]

`servers` has the two measured processes: `chatcache serve` over the engine of `clock_engine`, and a bare uvicorn
write loop. `clients` opens the streams in a third process and evaluates what arrived. They share the clock of
`ticks`: each token's text is the number of the tick that emitted it, and the time of each tick is stored in a mapped
file, so a client can compute how long a token took from the engine, over the engine's pipe, through the gateway and a
socket. CPU time is user plus system time of the server process, divided by the tokens that arrived in the same
window.

Where the time of a token goes, measured on two virtual cores of a Xeon shared with other programs
(`loadtest/results/`): with 2,000 chat streams at 10 tokens/s a token costs 46 us of CPU, 15 of them in the kernel; in
the bare loop 22 us, 11 of them in the kernel. `strace` shows one `write` per token and nothing else that grows with
the tokens; half of the kernel time is the loopback waking the client. The path from the engine's event to the ASGI
message takes 8 us with 200 streams, which fit the caches, and 16 us with 2,000 (Responses: 15 us with 200, because
its log has a writer and readers, so two tasks wake). A total of 10 us is therefore out of reach with one `write` per
token on that machine.

Removed so far, from 122 us: a task, a timer and a future per chunk for keep-alive; a cancel scope per send; a
dictionary and its JSON per chunk; the locks of a histogram; frozen dataclasses per delta; a queue, a task and a
timeout per merged delta; garbage collection over everything that open streams hold.

`waited` in the table is time in which the process was ready to run while its core ran something else. If it is more
than one per cent, the latencies are not those of the gateway. `chrt -f 1` before the command keeps other programs
out.
"""
