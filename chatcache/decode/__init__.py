"""What a branch does next: candidates come in, actions on branches and outputs for the caller go out.

A strategy owns the decoding state of one request and knows neither pages nor tensors, so n-best and beam search are
ordinary code over small ints. Reading order: `actions` (the contract), `stop` (when a candidate ends), `penalties`
(sparse logit edits), `sampling` and `beam` (the two strategies), `factory` and `validate` (the doors).
"""
