"""Replies in progress: one engine request in, parsed events of its candidates out.

Reading order: service, candidate, parser, events.
"""
