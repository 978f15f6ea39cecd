"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], later [TOOL_CALLS]name[ARGS]{...}, once per call.

Its templates refuse ids of calls that are not nine letters or digits.
"""

from chatcache.text.tool_calls.syntax import Syntax

MISTRAL = Syntax(marker="[TOOL_CALLS]", listed=True, between="[ARGS]", id_chars=9)
