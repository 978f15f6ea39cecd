"""Structured outputs: compile a grammar, then mask the tokens that would violate it.

Reading order: compiler (requests to grammars, cache), sandbox and sandbox_process (bounded trial compile), state (masks
and progress per branch).
"""
