"""Replies in progress: one engine request in, parsed events of its candidates out.

Reading order: service, parser, events.
"""
