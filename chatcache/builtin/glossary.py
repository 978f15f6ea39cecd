"""Hold the words of the trade that the model explains: pages, forks, prefill and their kin."""

from random import Random

from chatcache.builtin.text import Turn, article, ask

# names that mean the same -> explanation
TERMS: tuple[tuple[str, str], ...] = (
    (
        "kv cache|key value cache|key-value cache",
        "The KV cache keeps the attention keys and values of all earlier tokens. "
        "With it, each new token only needs one small step instead of reading the whole text again.",
    ),
    (
        "kv page|page|cache page|kv block",
        "A KV page is a fixed number of token slots in the KV cache. Conversations hold "
        "lists of pages, so memory is handed out page by page and nothing has to be contiguous.",
    ),
    (
        "page table|block table",
        "A page table lists the pages of one branch in order. It turns a token's position into a page and an offset.",
    ),
    (
        "paged attention|pagedattention",
        "Paged attention reads keys and values through a page table. The pages may lie anywhere in memory.",
    ),
    (
        "prefix cache|prefix caching|prefix sharing",
        "A prefix cache finds pages that were already computed for the same "
        "beginning of a prompt. Two chats with the same system prompt compute it only once.",
    ),
    (
        "fork|conversation fork|forking",
        "A fork makes a second branch that shares all pages of the first. It costs almost "
        "nothing, because no page is copied until someone writes.",
    ),
    (
        "copy-on-write|copy on write|cow",
        "Copy-on-write means that branches share a page until one of them writes into "
        "it. Only then does that branch get its own copy.",
    ),
    (
        "beam search|beam",
        "Beam search keeps the few most likely continuations at every step and drops the rest. In "
        "chatcache the beams share their common pages.",
    ),
    (
        "n-best|n-best list|n best|best of n",
        "N-best means several answers to one question. They share the pages of the "
        "prompt and differ only in their own tokens.",
    ),
    (
        "prefill|prompt processing",
        "Prefill reads the whole prompt at once and fills the KV cache. It ends with the first token of the answer.",
    ),
    (
        "decode|decoding|decode step",
        "Decode produces the answer one token at a time. Each step reads the KV cache and adds one token to it.",
    ),
    (
        "ttft|time to first token",
        "TTFT is the time to the first token: how long you wait before the answer begins. A "
        "prefix cache makes it shorter.",
    ),
    (
        "itl|tpot|inter-token latency|time per output token",
        "Inter-token latency is the time between two tokens of an answer. It tells how fast the text flows.",
    ),
    ("throughput", "Throughput is the number of tokens per second over all requests together. Batching raises it."),
    (
        "token|tokens",
        "A token is a piece of text, such as a word or a part of it. Models read and write tokens, not letters.",
    ),
    (
        "tokenizer|tokenization|bpe",
        "A tokenizer cuts text into tokens and puts tokens back into text. Mine works on bytes, "
        "so it can write anything.",
    ),
    (
        "batching|continuous batching|batch",
        "Continuous batching runs many requests in one step. New requests join and finished ones leave at any step.",
    ),
    ("scheduler", "The scheduler decides which requests run in the next step and how many tokens each of them gets."),
    (
        "preemption",
        "Preemption pauses a request when memory runs out. Its pages are swapped out or computed again later.",
    ),
    (
        "eviction|lru|lru eviction",
        "Eviction frees pages that nobody uses. The page that was idle the longest goes first.",
    ),
    (
        "temperature|sampling temperature",
        "Temperature sets how freely the next token is drawn. Zero always takes the most "
        "likely one, higher values bring more variety.",
    ),
    (
        "top-p|top p|nucleus sampling",
        "Top-p keeps the most likely tokens until their probabilities add up to p. The next token is drawn from those.",
    ),
    ("top-k|top k", "Top-k keeps only the k most likely tokens. The next token is drawn from those."),
    (
        "greedy decoding|greedy search|greedy",
        "Greedy decoding always takes the most likely token. The same prompt then gives the same answer.",
    ),
    ("attention|self-attention", "Attention lets each token look at the tokens before it and gather what it needs."),
    (
        "transformer|language model|llm|large language model",
        "A language model predicts the next token from the tokens before it. Nearly all of them are transformers.",
    ),
    (
        "streaming|sse|server-sent events",
        "Streaming sends each piece of the answer as soon as it exists. chatcache does "
        "it with server-sent events or a WebSocket.",
    ),
    (
        "websocket|websockets",
        "A WebSocket is a lasting connection that carries messages both ways. chatcache can stream answers over it.",
    ),
    ("system prompt", "A system prompt is a text before the conversation that says how the assistant should behave."),
    (
        "context window|context length|context",
        "The context is all the text that a model can look at. Mine holds 2048 tokens.",
    ),
    (
        "speculative decoding",
        "Speculative decoding lets a small model guess several tokens, which the large model then checks in one step.",
    ),
    ("quantization", "Quantization stores numbers with fewer bits. It saves memory and costs a little accuracy."),
    ("gpu", "A GPU is a processor that does many simple calculations at once. Language models run fast on it."),
    ("chunked prefill", "Chunked prefill reads a long prompt in pieces, so that other requests do not have to wait."),
    (
        "branch|candidate",
        "A branch is one possible continuation of a request. Branches share the pages they have in common.",
    ),
    ("redis", "Redis is a fast in-memory store. chatcache can use it to keep conversations and to link machines."),
)

TERM_QUESTIONS = (
    "what is {a}?|what is {t}?|explain {t}|what does {t} mean?|tell me about {t}|{t}?|define {t}|how does {a} work?|"
    "what is the meaning of {t}?|can you explain {t}?|can you explain what {a} is?|do you know what {a} is?|"
    "i do not understand {t}|what do you mean by {t}?|describe {t}|what exactly is {a}?|explain {t} to me|why {t}?"
)
UPPER = ("kv", "ttft", "itl", "tpot", "lru", "llm", "sse", "gpu", "bpe")


def term(rng: Random) -> Turn:
    """Ask for a word of the trade."""
    names, answer = rng.choice(TERMS)
    name = rng.choice(names.split("|"))
    if rng.random() < 0.6:
        name = " ".join(part.upper() if part in UPPER else part for part in name.split())
    return Turn(ask(rng, TERM_QUESTIONS, t=name, a=name if name.endswith("s") else article(name)), answer)
