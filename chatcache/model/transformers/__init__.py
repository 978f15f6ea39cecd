"""Any other `transformers` causal LM, unchanged, on KV pages.

transformers calls an attention function that is registered by name with q, k and v of every layer. The function in
`attention` stores k and v in pages and attends through the step's kernels. The batch runs flattened as one sequence
[1, T] with explicit positions. The `AttentionStep`, which maps tokens to rows, is passed through `forward` as a keyword
argument. No mask function is registered for the name, so transformers builds no attention mask.
"""
