"""What a branch does next: candidates come in, actions on branches and outputs for the caller go out.

A strategy owns the decoding state of one request and knows neither pages nor tensors, so n-best and beam search are
ordinary code over small ints. Reading order: `actions` (the contract), `stop` (when a candidate ends), `penalties`
(sparse logit edits), `constraint` (keeping within a grammar), `drawing` (what is asked of the logits), `sampling` (a
strategy without siblings to mind), `factory` and `validate` (the doors). Searches stand on `streaming` (a tree of
tokens: what is agreed on is final) and `lineage` (who inherits which branch): `beam` over `groups` over `hypotheses`,
and `distinct`.
"""
