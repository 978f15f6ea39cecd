"""Conversations: what was said, as a tree of messages that keep their token ids.

A reply's tokens are the only exact record of what the model has in its pages, so they are stored and reused; only text
that is new this turn is ever tokenised. That is what makes the next turn, a regenerate or a fork hit the pages of the
last one.

    tree.py           items joined by `parent_id` alone, and the exact token sequence behind each reply
    messages.py       messages with calls, results and reasoning
    tools.py          functions that a model is told of
    prompt.py         messages -> token ids, reusing the ids of replies already known
    public.py         how many leading tokens of a prompt are an operator-declared system prompt
    transcripts.py    a bounded memory of replies for clients that resend the whole history as text
    service.py        submit to the engine, merge candidates' text, yield reply events
    forks.py          replies cut in their middle, finished or still growing
    reading.py        a candidate's text, reasoning and calls, told apart as they come
    live_beams.py     a running beam search as text
    spans.py          where each message of a prompt ends
    places.py         where a stored turn continues
    conversations.py  one stored turn: assemble it, open it, settle it; items.py what it stores of what was said
    store.py          the storage contract
    search.py         what a query finds in a text, whatever stores it
    removal.py        what taking a message or a response out of a tree changes
    store_sqlite.py   the contract on one SQLite file; sqlite_schema.py, sqlite_rows.py, sqlite_reads.py,
                      sqlite_search.py, sqlite_writer.py (threads), sqlite_claims.py (idempotency keys) are its parts
    store_redis.py    the contract on a Redis server; redis_link.py (connections, transactions), redis_rows.py (layout),
                      redis_reads.py, redis_search.py, redis_leases.py (who runs what) are its parts
    redis_rights.py   what a Redis server lets its user see and do
    open_store.py     which of the two
    keys.py           API keys and their contract; keys_sqlite.py and keys_redis.py keep them beside the conversations
    archive.py        all that a store holds as one file; archive_reader.py and restore.py back into a store
    sqlite_backup.py  the SQLite file copied, or read, while a server writes it
    portable.py       a conversation as a file, and portable_reader.py back; chatgpt.py reads ChatGPT's
    drafts.py         what such a file says, checked; adoption.py makes it an owner's conversation, once
    markdown.py       a conversation to read
    side_tasks.py     small questions (a title) asked at the end of a conversation and kept out of it
    owners.py         whose conversations, and whose pages
    ids.py            time-ordered ids
"""
