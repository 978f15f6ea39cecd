"""The loop that everything else serves: plan -> execute -> advance -> commit -> events.

Why a room of its own: pages, scheduling and decoding know nothing of each other's insides; here they meet, and here
the promise is kept that every accepted request ends in exactly one terminal event, whatever happens.

    client.py     the two protocols at the edges: ModelRunner below, EngineClient above
    engine.py     the loop
    admission.py  what is refused at the door, with the numbers
    outbox.py     events, numbered 1, 2, 3, ... per request
    fake.py       a runner without a model, which reads its history back through simulated pages
"""
