"""Text to tokens and back, without ever waiting for a heavy import.

The `tokenizers` library encodes; everything on the way back is bytes: each token has its bytes (`pieces`), so decoding
is concatenation, streaming is an incremental UTF-8 decoder (`stream`), and stop strings are found whatever the token
boundaries. `template` renders chats in a sandbox, `quoting` keeps control tokens that people type from being control,
`tokenizer` is the door to all of it, and `folder` reads one. `reply_format` tells how a model writes thoughts and
calls; `reasoning` and `tool_calls` read them apart, from a stream cut anywhere.
"""
