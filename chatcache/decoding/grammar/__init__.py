"""Structured outputs: compile a grammar, then mask the tokens that would leave it. Read `state`, then `compiler`."""
