"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as many as it takes."""

from chatcache.text.tool_calls.syntax import Syntax

HERMES = Syntax(marker="<tool_call>", joints={"</tool_call>": False})
