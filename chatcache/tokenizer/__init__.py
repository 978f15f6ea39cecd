"""Text to token ids and back, chat templates, and parsers for reasoning and tool calls.

The `tokenizers` library encodes text. Decoding is done on bytes: every token has a fixed byte string, so decoding is
concatenation, streaming is an incremental UTF-8 decoder, and stop strings are found across token boundaries.

Reading order: tokenizer, chat_template, template_sandbox, detokenizer, reply_format, reasoning, tool_formats,
template_probes, tool_parser, argument_readers, harmony, tool_grammar, argument_grammar.
"""
