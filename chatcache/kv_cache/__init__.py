"""Which page holds which token.

Why: KV memory is the scarce thing in a chat backend, and almost all of it is a repetition of something computed
before: the system prompt, the conversation so far, the prompt of n candidates. So memory is cut into pages of
`page_size` tokens, pages are counted by how many hold them, named by the tokens they contain, and copied only when
somebody is about to write into one that somebody else reads.

    keys.py       a page's name: a hash chain over its tokens and everything before them
    chain.py      the names of a whole prompt, and who may find them: public pages, then a tenant's own
    children.py   which published pages follow which
    pool.py       all pages: reference counts, the index of names, the idle ones in eviction order
    matching.py   what of a prompt is already computed
    explain.py    why not more of it is
    table.py      one branch's pages in order; forks share the front of it
    tails.py      its last page: who may write into it, and who has to copy it first
    host.py       the second tier: copies in host memory, of requests that had to make room
    restoring.py  bringing them back
    cache.py      the operations: match, open, reserve, commit, fork, truncate, close
    audit.py      what the pages are used for; the proof that pool and tables agree

Nothing here knows of requests, steps or tensors: pages are plain ints.
"""
