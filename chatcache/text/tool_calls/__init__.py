"""Function calls in what a model writes: found in the stream, or forced by a grammar.

call_object.py   one call as JSON, read as it comes
parser.py        text and calls apart, for any format
syntax.py        what a format is: its marks, and how the calls of one reply are joined
hermes.py llama3.py mistral.py   the formats
grammar.py       what the client allows (which functions, whether any, how many), as a grammar

Which format a model writes is told in `text.reply_format`.
"""
