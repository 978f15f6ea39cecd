"""The paged KV cache: which page holds which tokens, and who may reuse them.

KV memory is the scarce resource of a chat server, and most of it repeats something computed before: the system prompt,
the conversation so far, the prompt shared by n candidates. The cache therefore divides KV memory into pages of
`page_size` tokens (PagedAttention), counts the references to each page, finds computed pages by a hash of their tokens
(prefix caching), and copies a page only when a branch is about to write into a page that another branch uses (copy on
write). Pages are plain integers here: nothing in this package knows about requests, steps or tensors.

Reading order: `page_hash`, `pool`, `page_table`, `prefix_match`, `copy_on_write`, `host`, `manager` (`KVCache`, the
interface that the scheduler calls), `stats`.
"""
