"""Llama 3: {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>; several are joined by semicolons."""

from chatcache.text.tool_calls.syntax import Syntax

LLAMA3 = Syntax(marker="<|python_tag|>", bare=True, joints={";": True})
