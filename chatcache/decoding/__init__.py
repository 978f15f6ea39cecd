"""Decoding strategies.

Candidate tokens come in; branch actions and outputs for the caller go out.

A strategy holds the decoding state of one request and knows neither pages nor tensors, so n-best and beam search are
ordinary code over small integers. The contract (`Strategy`, actions) is in `chatcache.types.actions`.

Reading order: stopping, token_bans, logit_edits, sampling, token_tree, beam_search, unique, grammar, strategy.
"""
