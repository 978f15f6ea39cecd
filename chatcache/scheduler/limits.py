"""What can ever fit: the pages a request needs in the worst case, known when it is submitted.

Worst case: nothing matched, all `num_branches` branches alive to the end, sharing the prompt's full pages only. The
last token drawn is never computed, so a branch stores at most num_prompt_tokens + max_tokens - 1 tokens.
"""

from __future__ import annotations


def worst_case_pages(num_prompt_tokens: int, max_tokens: int, num_branches: int, page_size: int) -> int:
    """Return the most pages the request can hold at once."""
    num_pages = -(-(num_prompt_tokens + max_tokens - 1) // page_size)
    if max_tokens == 1:
        return num_pages  # nobody writes after the prompt
    num_shared = num_prompt_tokens // page_size
    return num_shared + num_branches * (num_pages - num_shared)


def max_tokens_that_fit(num_prompt_tokens: int, num_branches: int, page_size: int, num_pages: int) -> int:
    """Return the largest `max_tokens` whose worst case is at most `num_pages`; less than 1 if none is."""
    num_shared = num_prompt_tokens // page_size
    num_private = (num_pages - num_shared) // num_branches
    most = (num_shared + num_private) * page_size - num_prompt_tokens + 1
    return most if most > 1 else int(num_prompt_tokens <= num_pages * page_size)
