"""Conversations.

Trees of messages that keep their token ids, turns over them, and parsed replies.

A reply's stored tokens are the only exact record of what its KV pages hold, so they are reused; only text that is new
in a turn is tokenised. Therefore the next turn, a regeneration or a fork finds the pages of the turn before.

Reading order: tree, store (the contract; storage implements it), prompt, fork_points, turns, replies/service; then
search, offsets, titles and token_memo.
"""
