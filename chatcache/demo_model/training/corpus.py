"""Compose whole dialogues from every skill, and turn them into token ids.

The generator is the training set: one seed gives one endless stream, with nothing to download. Values whose hash falls
into the held-out tenth never appear here, so that the figures of `evaluate` are honest. The tokenizer splits digits
singly, so that a sum is columns of digits and not a lookup of number words; every byte has a token of its own, so that
any text survives the round trip.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from chatcache.demo_model.training import facts, long_answers, skills
from chatcache.demo_model.training.facts import SELF
from chatcache.demo_model.training.personas import FACTS, STYLES_AFTER, Memory, Persona, change_style, persona
from chatcache.demo_model.training.tool_dialogues import tool_dialogue
from chatcache.demo_model.training.wording import Turn, ask

Message = dict[str, str]
Dialogue = list[Message]
Skill = Callable[[Random], Turn | list[Turn]]

# weights are shares of turns; sums and spelling need the most practice per unit of skill
SKILLS: tuple[tuple[Skill, float], ...] = (
    (skills.sums, 20), (skills.drill, 12), (skills.too_large, 1.5), (skills.compare, 3),
    (skills.count, 9), (skills.puzzle, 1), (skills.roll_die, 0.7),
    (skills.spell, 14), (skills.letters, 6), (skills.repeat, 6), (skills.calendar, 4),
    (skills.opposite, 2.5), (skills.rhyme, 2), (skills.color_of, 2), (skills.sound, 1),
    (skills.capital, 2), (skills.choose, 2),
    (long_answers.story, 4), (long_answers.poem, 2), (long_answers.joke, 1.5), (long_answers.small_talk, 6),
    (long_answers.bullets, 4), (long_answers.table, 2), (long_answers.program, 4),
    (facts.about, 5), (facts.term, 5), (facts.trivia, 3), (facts.unknown, 6),
)  # fmt: skip
# turns that are short enough to fill the time between telling and recalling
LIGHT: tuple[tuple[Skill, float], ...] = (
    (skills.sums, 10), (skills.drill, 1), (skills.compare, 2),
    (skills.spell, 3), (skills.count, 1), (skills.repeat, 1), (skills.calendar, 2), (skills.opposite, 2),
    (skills.color_of, 1), (skills.capital, 2), (skills.choose, 1), (long_answers.small_talk, 6), (facts.about, 2),
    (facts.term, 2), (facts.trivia, 1), (facts.unknown, 2), (long_answers.bullets, 1), (long_answers.joke, 1),
)  # fmt: skip


def draw(rng: Random, skills: tuple[tuple[Skill, float], ...]) -> list[Turn]:
    """Return the turns of one skill, drawn at random with these weights."""
    skill = rng.choices([one for one, _ in skills], [weight for _, weight in skills])[0]
    turns = skill(rng)
    return turns if isinstance(turns, list) else [turns]


def _identity(rng: Random, name: str) -> Turn:
    question = ask(
        rng, "who are you?|what is your name?|what are you called?|introduce yourself|do you have a name?|your name?"
    )
    return Turn(question, f"I am {name}.")


def _turns(rng: Random, who: Persona, num_turns: int, remembering: float) -> list[Turn]:
    skills = LIGHT if remembering > 0.5 else SKILLS
    turns: list[Turn] = []
    while len(turns) < num_turns:
        if rng.random() < remembering * 0.7:
            turns.append(_remember(rng, who.memory))
        elif who.assistant_name and rng.random() < 0.4:
            turns.append(_identity(rng, who.assistant_name))
        elif turns and rng.random() < 0.03:
            turns.append(_quote(rng, turns))
        elif rng.random() < 0.03:
            turns.append(change_style(rng))
        elif rng.random() < 0.05:
            turns.append(
                _joined(who.memory.state(rng) if rng.random() < 0.4 else draw(rng, LIGHT)[0], draw(rng, LIGHT)[0])
            )
        else:
            drawn = draw(rng, skills)
            # the ready-made introduction does not know a name given by the system prompt
            turns += [] if who.assistant_name and drawn[0].answer == SELF else drawn
    if remembering > 0.5 and who.memory.values:
        turns.append(who.memory.recall(rng))
    return turns


def _remember(rng: Random, memory: Memory) -> Turn:
    """Return a turn in which the user states one fact or two, or asks for them."""
    unstated = len(FACTS) - len(memory.values)
    if rng.random() < 0.45 or not memory.values:
        return memory.state_two(rng) if unstated > 1 and rng.random() < 0.15 else memory.state(rng)
    if len(memory.values) > 1 and rng.random() < 0.15:
        return memory.recall_two(rng)
    return memory.recall_all(rng) if rng.random() < 0.06 else memory.recall(rng)


def _quote(rng: Random, turns: list[Turn]) -> Turn:
    """Return a turn in which the user asks for the first or last question of this dialogue."""
    if rng.random() < 0.5:
        question = ask(
            rng, "what did i just say?|what did i just ask?|what was my last question?|repeat my last message"
        )
        return Turn(question, f'You wrote: "{turns[-1].user}"', plain=True)
    question = ask(rng, "what was my first question?|what did i ask first?|what was my first message?")
    return Turn(question, f'You wrote: "{turns[0].user}"', plain=True)


def _joined(one: Turn, two: Turn) -> Turn:
    """Join two turns into one, whose message asks both questions."""
    mark = "" if one.user[-1] in ".?!" else "."
    return Turn(f"{one.user}{mark} {two.user[0].upper()}{two.user[1:]}", f"{one.answer} {two.answer}", plain=True)


def compose(who: Persona, turns: list[Turn]) -> Dialogue:
    """Return the messages of a dialogue, with every answer in the style of its persona."""
    messages = [{"role": "system", "content": who.system}] if who.system else []
    style = who.style
    for turn in turns:
        style = STYLES_AFTER[turn.becomes] if turn.becomes else style
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": style(turn)})
    return messages


def short_dialogue(rng: Random) -> Dialogue:
    """Return a dialogue of one to about ten turns."""
    who = persona(rng, name="none" if rng.random() < 0.35 else None)
    if rng.random() < 0.3:
        return compose(who, _turns(rng, who, rng.choice((1, 2, 3, 3, 4, 5, 6, 8, 10)), remembering=0.7))
    return compose(who, _turns(rng, who, rng.choice((1, 1, 2, 3, 4)), remembering=0.08))


def long_dialogue(rng: Random) -> Dialogue:
    """Return a dialogue that fills a large part of the context.

    It has many turns, a long system prompt, or both.
    """
    num_handbook = rng.choice((0, rng.randint(10, 30), rng.randint(30, 75)))
    who = persona(rng, num_handbook=num_handbook)
    num_turns = rng.randint(8, 60) if num_handbook < 30 else rng.randint(2, 20)
    return compose(who, _turns(rng, who, num_turns, remembering=rng.choice((0.1, 0.3, 0.7))))


def stream(seed: int, *, long_share: float = 0.0, tool_share: float = 0.0) -> Iterator[Dialogue]:
    """Yield dialogues for ever; the same arguments give the same dialogues on every machine."""
    rng = Random(seed)
    while True:
        choice = rng.random()
        if choice < long_share:
            yield long_dialogue(rng)
        else:
            yield tool_dialogue(rng) if choice < long_share + tool_share else short_dialogue(rng)


PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
VOCAB_SIZE = 1536
MAX_POSITIONS = 2048
IGNORED = -100

# Each message is rendered on its own: the prompt of a longer history begins with that of a shorter one. Functions are a
# message of their own, one line for each in the form of a call; it follows the system prompt, whose pages are then the
# same with and without functions. Nested types and descriptions of arguments are left out, to save context.
CHAT_TEMPLATE = (
    "{% macro kind(schema) %}"
    "{% if schema['enum'] %}{{ schema['enum'] | map('tojson') | join('|') }}"
    "{% elif schema['anyOf'] %}"
    "{% for each in schema['anyOf'] %}{{ '' if loop.first else '|' }}{{ kind(each) }}{% endfor %}"
    "{% elif schema['type'] is string %}"
    "{% if schema['type'] == 'array' and schema['items'] is mapping %}{{ '[' + kind(schema['items']) + ']' }}"
    "{% else %}{{ schema['type'] }}{% endif %}"
    "{% elif schema['type'] %}{{ schema['type'] | join('|') }}"
    "{% else %}any{% endif %}"
    "{% endmacro %}"
    "{% macro declare() %}"
    "{% for tool in tools %}"
    "{% set function = tool['function'] %}{% set schema = function['parameters'] or {} %}"
    "{{ '' if loop.first else '\n' }}{{ '{\"name\": ' + function['name'] | tojson + ', \"arguments\": {' }}"
    "{% for name in schema['properties'] or {} %}"
    "{{ '' if loop.first else ', ' }}{{ name | tojson }}{{ '' if name in (schema['required'] or []) else '?' }}"
    "{{ ': ' + kind(schema['properties'][name]) }}"
    "{% endfor %}"
    "{{ '}}' }}{% if function['description'] %}{{ ' ' + function['description'] | trim }}{% endif %}"
    "{% endfor %}"
    "{% endmacro %}"
    "{% macro calls(message) %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '' if loop.first and not message['content'] else '\n' }}"
    "{{ '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{% endmacro %}"
    "{% set front = 1 if messages and messages[0]['role'] == 'system' else 0 %}"
    "{% for message in messages[:front] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if tools %}{{ '<|im_start|>tools\n' + declare() + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages[front:] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + calls(message) + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(dialogue: Dialogue) -> str:
    """Return the text of a dialogue, with functions and calls as text, as the chat template writes it."""
    return "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in dialogue)


def train_tokenizer(seed: int, num_dialogues: int = 30_000) -> Tokenizer:
    """Train a BPE tokenizer on generated dialogues."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (render(dialogue) for dialogue in itertools.islice(stream(seed), num_dialogues))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Write `tokenizer.json` and its configuration for `transformers.AutoTokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Encoder:
    """Turns dialogues into token ids and targets; only the assistant's answers are targets."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start_id, self.end_id = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
        self.header = tokenizer.encode(f"{START}assistant\n").ids

    def encode(self, dialogues: Sequence[Dialogue]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids [T] and targets [T] for each dialogue, cut at the context length."""
        encodings = self.tokenizer.encode_batch_fast([render(dialogue) for dialogue in dialogues])
        pairs = []
        for encoding in encodings:
            ids = np.asarray(encoding.ids[: MAX_POSITIONS + 1], dtype=np.int64)
            pairs.append((ids[:-1], np.where(self.spoken(ids), ids, IGNORED)[1:]))
        return pairs

    def spoken(self, ids: np.ndarray) -> np.ndarray:
        """Return which tokens belong to the assistant's answers, with their end token: bool [T]."""
        spoken = np.zeros(len(ids), dtype=bool)
        starts = np.flatnonzero(ids == self.start_id)
        for begin, after in itertools.zip_longest(starts, starts[1:], fillvalue=len(ids)):
            if list(ids[begin : begin + len(self.header)]) == self.header:
                ends = np.flatnonzero(ids[begin:after] == self.end_id)
                stop = begin + ends[0] + 1 if len(ends) else after
                spoken[begin + len(self.header) : stop] = True
        return spoken
