"""The loop that everything else serves: plan -> launch -> collect -> commit -> advance -> events.

Why a room of its own: pages, scheduling and decoding know nothing of each other's insides; here they meet, and here
the promise is kept that every accepted request ends in exactly one terminal event, whatever happens.

    client.py     the two protocols at the edges: ModelRunner below, EngineClient above
    engine.py     the loop
    flight.py     steps on the device: launched, one behind another where the runner runs ahead, and collected
    build.py      the scheduler that the configuration asks for
    admission.py  what is refused at the door, with the numbers
    intake.py     from a caller's request to a live one
    room.py       how much may wait
    namespaces.py whose requests came lately
    resuming.py   requests that an engine which died had begun
    preparing.py  requests whose grammar is still being compiled
    results.py    a step's result, read with suspicion
    scoring.py    prompt log-probabilities, step by step
    outbox.py     events, numbered 1, 2, 3, ... per request
    selfcheck.py  the books, checked whenever the engine falls idle
    health.py     what the engine tells of itself; durations.py how long its requests took
    pages.py      what the pages hold, for those who ask; accounts.py who holds them, page_gauge.py their map
    fake.py       a runner without a model, which reads its history back through simulated pages
    fake_device.py  its queue of steps, when it runs ahead

What a step costs beside the runner (4,096 sampling requests that each draw one token, by profile): about 30 % are the
strategies' answers, 30 % events, 25 % applying the answers, 4 % plan and commit (see `chatcache bench kv`), the rest is
sorting and looping. A fifth of it all is garbage collection, and was more: so what is made once per token is a struct
without `gc`.
"""
