"""Requests, parameters and events: the vocabulary that the rooms share. Frozen data that crosses a pipe and a Redis
stream unchanged.

    params.py    how to generate
    request.py   what to continue
    events.py    what a request is told
    pages.py     what is told of the pages
    health.py    what the engine tells of itself
    model.py     what is told of the model
"""
