# ruff: noqa: SIM905  (word lists read better as text)
"""Generate questions about chatcache, its terms, the world, and without an answer."""

from __future__ import annotations

from random import Random

from chatcache.demo_model.training.wording import CITIES, JOBS, KINDS, NAMES, Turn, article, ask, invent, say

ABILITIES = (
    "I can chat a little, add and subtract, spell words, count, tell short stories and poems, write lists, tables and "
    "tiny Python programs, and remember what you tell me in this conversation."
)
SELF = (
    "I am chatcache's built-in demonstration model: small, trained from scratch, here to make every feature visible "
    "without a download."
)

# question templates -> answers; every answer is right for every question of its row
SELF_QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "who are you?|what are you?|introduce yourself|tell me about yourself|what model is this?|which model are you?|"
        "what is your name?|are you chatgpt?|what kind of ai are you?|who am i talking to?|which llm are you?|"
        "are you a large language model?|what model are you?|do you have a name?|your name?|describe yourself",
        (SELF,),
    ),
    (
        "are you a real ai?|are you smart?|are you intelligent?|how big are you?|how many parameters do you have?|"
        "how large are you?|are you a good model?|are you a demo?|are you small?",
        (
            "I am a demonstration model with about three million parameters, so please do not expect too much of me. "
            "I exist to show what chatcache does.",
        ),
    ),
    (
        "who made you?|who created you?|who trained you?|where do you come from?|how were you trained?|who built you?|"
        "what were you trained on?|what data were you trained on?",
        (
            "I was trained from scratch on a CPU, on dialogues that a script in chatcache generated. "
            "No outside data was used.",
        ),
    ),
    (
        "what can you do?|help|help me|what are you able to do?|what can i ask you?|"
        "what do you know?|how can you help me?|"
        "what are your features?|what can i do here?|what are your skills?|list your abilities|what should i ask you?",
        (ABILITIES,),
    ),
    (
        "what can you not do?|what are your limits?|what don't you know?|what are your weaknesses?",
        (
            "I know little about the world, I only calculate with numbers below 100, and I cannot look anything up. "
            "For real work, start chatcache with a larger model.",
        ),
    ),
    (
        "are you human?|are you a robot?|are you a person?|are you real?|are you alive?|"
        "are you a bot?|are you conscious?",
        ("I am not a person. I am a small language model that runs inside chatcache.",),
    ),
    (
        "do you have feelings?|can you feel?|do you dream?|do you sleep?|do you get tired?",
        ("No, I have no feelings. I only predict the next token, again and again.",),
    ),
    (
        "how old are you?|when were you born?|when is your birthday?",
        ("I have no age. I was trained in about an hour.",),
    ),
    (
        "where do you live?|where are you?|where are you from?",
        ("I live in a few megabytes of weights inside chatcache.",),
    ),
    (
        "what languages do you speak?|do you speak german?|do you speak french?|"
        "can you speak spanish?|do you know chinese?",
        ("I only speak simple English.",),
    ),
    (
        "can you see images?|can you see me?|can you hear me?|can you browse the internet?|can you search the web?|"
        "can you open a website?",
        ("No. I only read and write text, and I cannot look anything up.",),
    ),
    (
        "what is chatcache?|tell me about chatcache|explain chatcache|what does chatcache do?|chatcache?|what is this?|"
        "what is this project?|what is this app?|how does chatcache work?",
        (
            "chatcache is a chat-assistant backend that owns its KV cache. It keeps the cache in "
            "pages, shares pages between "
            "conversations that start alike, and forks conversations without copying.",
        ),
    ),
    (
        "why chatcache?|why should i use chatcache?|what is special about chatcache?|what is chatcache good for?",
        (
            "With chatcache a long chat stays fast: the pages of earlier turns are reused, and several answers to one "
            "question share the same prompt.",
        ),
    ),
    (
        "how do i use another model?|can i use a bigger model?|how do i load a different model?|"
        "can i change the model?",
        (
            "Start chatcache with the path of another model. I am only the built-in one, so that "
            "nothing has to be downloaded.",
        ),
    ),
    (
        "are you open source?|is chatcache free?|is chatcache open source?|can i read your source code?",
        (
            "Yes. The script that generated my dialogues and trained me is part of chatcache, and "
            "you can run it yourself.",
        ),
    ),
    (
        "do you remember me?|will you remember this?|do you store my data?|do you have memory?|do you remember things?",
        ("I remember what you tell me within this conversation, and nothing beyond it.",),
    ),
)


def about(rng: Random) -> Turn:
    """Return a turn that asks about the model or about chatcache."""
    frequent = SELF_QUESTIONS[:4] + SELF_QUESTIONS[11:13]
    questions, answers = rng.choice(SELF_QUESTIONS if rng.random() < 0.6 else frequent)
    return Turn(ask(rng, questions), rng.choice(answers))


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
    """Return a turn that asks for the meaning of a technical term."""
    names, answer = rng.choice(TERMS)
    name = rng.choice(names.split("|"))
    if rng.random() < 0.6:
        name = " ".join(part.upper() if part in UPPER else part for part in name.split())
    return Turn(ask(rng, TERM_QUESTIONS, t=name, a=name if name.endswith("s") else article(name)), answer)


TRIVIA: tuple[tuple[str, str], ...] = (
    ("how many days are in a week?|how many days does a week have?", "A week has seven days."),
    ("how many months are in a year?|how many months does a year have?", "A year has twelve months."),
    ("how many days are in a year?|how many days does a year have?", "A year has 365 days, and a leap year has 366."),
    ("how many hours are in a day?|how many hours does a day have?", "A day has 24 hours."),
    ("how many minutes are in an hour?", "An hour has 60 minutes."),
    ("how many seconds are in a minute?", "A minute has 60 seconds."),
    ("how many legs does a spider have?", "A spider has eight legs."),
    ("how many legs does a dog have?|how many legs does a cat have?", "It has four legs."),
    ("how many legs does an insect have?|how many legs does an ant have?", "Insects have six legs."),
    ("how many letters are in the alphabet?", "The alphabet has 26 letters."),
    ("how many planets are there?|how many planets are in the solar system?", "There are eight planets."),
    ("what is the largest planet?|which planet is the biggest?", "Jupiter is the largest planet."),
    ("what is the highest mountain?|what is the tallest mountain?", "Mount Everest is the highest mountain."),
    ("what is the largest ocean?|which ocean is the biggest?", "The Pacific is the largest ocean."),
    ("what do bees make?|who makes honey?", "Bees make honey."),
    ("what do cows drink?", "Cows drink water."),
    ("what is ice?|what is ice made of?", "Ice is frozen water."),
    ("what is the meaning of life?|what is the answer to everything?", "Some say 42. I am too small to know better."),
    (
        "say the alphabet|what is the alphabet?|recite the alphabet",
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
    ),
    (
        "what are the days of the week?|list the days of the week|name the days of the week",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        "what are the months of the year?|list the months|name all months|name the twelve months",
        "January, February, March, April, May, June, July, August, September, October, November and December.",
    ),
    ("what are the seasons?|name the four seasons|list the seasons", "Spring, summer, autumn and winter."),
    ("what is water?|what is water made of?", "Water is made of hydrogen and oxygen."),
    ("what is the sun?", "The sun is a star, and the earth travels around it."),
    ("what is the moon?", "The moon travels around the earth."),
    ("what is python?", "Python is a programming language. I can write very small programs in it."),
    ("what is a computer?", "A computer is a machine that follows programs."),
)


def trivia(rng: Random) -> Turn:
    """Return a turn that asks for one of the few facts of the world that the model learns."""
    questions, answer = rng.choice(TRIVIA)
    return Turn(ask(rng, questions), answer)


UNKNOWN_QUESTIONS = (
    "who won the {t} cup in {y}?|what happened in {y}?|who is the president of {t}?|"
    "what is the weather in {t}?|what time is it?|"
    "what is the weather today?|what day is it today?|what is the date?|explain quantum {t}|translate {t} into French|"
    "how do i repair my {t}?|what is the price of {t}?|who wrote {t}?|"
    "what does {t} mean in German?|how far is {t} from {u}?|"
    "write an essay about {t}|summarize the book {t}|who is {t}?|tell me the history of {t}|"
    "how many people live in {t}?|"
    "what is the best {t} in {u}?|can you book a flight to {t}?|send an email to {t}|what is the stock price of {t}?|"
    "recommend a movie about {t}|how do i cook {t}?|what is the formula for {t}?|"
    "why is the {t} so {u}?|where can i buy {t}?|"
    "what are the latest news about {t}?|how does a {t} work?|what is {t}?|who invented the {t}?|when was {t} born?|"
    "play music by {t}|solve the equation {t}|is {t} better than {u}?|"
    "what should i wear in {t}?|open the {t}|explain {t} to a child|"
    "give me a recipe for {t}|should i buy a {t}?|how old is {t}?|"
    "what is the difference between {t} and {u}?|how tall is {t}?|"
    "what do you think about {t}?|fix this bug: {t}|write javascript code for {t}|"
    "what is the population of {t}?|where is {t}?|"
    "what causes {t}?|are {t} dangerous?|can {t} fly?|does {t} hurt?|which {t} is the fastest?|what do {t} eat?"
)
UNKNOWN_TOPICS = (
    "gravity democracy inflation photosynthesis bicycle football climate volcano electricity "
    "blockchain medicine evolution "
    "philosophy shampoo laptop telephone dishwasher bitcoin tax insurance marathon opera "
    "chemistry biology physics algebra "
    "relativity dinosaurs sharks mountains rivers religion politics marketing sleep money "
    "love war peace music art history"
).split()
UNKNOWN_ANSWERS = (
    "I do not know that. I am only a small demonstration model.|Sorry, I do not know. I am a "
    "small demonstration model.|"
    "That is beyond me: I am only a small demonstration model.|I am afraid I do not know. "
    "Ask me for a story, a sum or a list instead."
)
NOISE = "asdf|qwerty|???|...|blah blah|lorem ipsum|abc|xyz|foo bar|hjkl|1 2 3|bla"


def _topic(rng: Random) -> str:
    choice = rng.random()
    if choice < 0.5:
        return rng.choice(UNKNOWN_TOPICS)
    if choice < 0.7:
        return rng.choice((rng.choice(CITIES), rng.choice(JOBS), rng.choice(NAMES), rng.choice(KINDS["tool"])))
    word = invent(rng, "unknown")
    return word if rng.random() < 0.5 else f"{word.lower()} {rng.choice(UNKNOWN_TOPICS)}"


def unknown(rng: Random) -> Turn:
    """Return a turn that asks something that the model cannot know, or that is nonsense."""
    if rng.random() < 0.08:
        return Turn(ask(rng, NOISE), "I did not understand that. Ask me for a story, a sum or a list.")
    question = ask(rng, UNKNOWN_QUESTIONS, t=_topic(rng), u=_topic(rng), y=rng.randint(1900, 2030))
    return Turn(question, say(rng, UNKNOWN_ANSWERS), "I do not know.")
