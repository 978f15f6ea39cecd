"""Compose dialogues with functions: with some that need a call, and some that do not.

A dialogue holds the text that the chat template writes: a message of the role `tools` has one line for each function,
in the form of a call, and a call is the content of an assistant's message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random

from chatcache.demo_model.training import facts, long_answers, skills
from chatcache.demo_model.training.personas import Memory, Persona, persona
from chatcache.demo_model.training.tools import (
    EXTRACT_LEADS,
    Offer,
    Task,
    Tool,
    calculator,
    call_text,
    clock,
    extract,
    handoff,
    message,
    note,
    person,
    search,
    simple,
    stock,
    translate,
    weather,
)
from chatcache.demo_model.training.wording import Turn, say

Message = dict[str, str]
Skill = Callable[[Random], Turn | list[Turn]]

OFFERS: tuple[tuple[Callable[[Random, bool], Offer], float], ...] = (
    (weather, 8), (calculator, 7), (clock, 4), (search, 4), (extract, 3), (stock, 1), (translate, 0.7), (simple, 2),
    (handoff, 0.4), (message, 0.5),
)  # fmt: skip
# turns that no offered function can serve
ORDINARY: tuple[tuple[Skill, float], ...] = (
    (long_answers.small_talk, 8), (facts.about, 4), (facts.trivia, 3), (skills.capital, 3), (skills.opposite, 3),
    (skills.calendar, 3), (skills.spell, 2), (skills.color_of, 2), (skills.count, 2), (skills.choose, 1),
    (long_answers.joke, 2), (long_answers.story, 2), (skills.repeat, 2), (skills.letters, 2), (skills.compare, 2),
    (long_answers.bullets, 1), (long_answers.poem, 1),
)  # fmt: skip


def offers(rng: Random, count: int, held: bool = False) -> list[Offer]:
    """Draw functions of different kinds and names."""
    drawn: list[Offer] = []
    while len(drawn) < count:
        make = rng.choices([make for make, _ in OFFERS], [weight for _, weight in OFFERS])[0]
        offer = make(rng, held)
        if all(offer.kind != other.kind and offer.tool.name != other.tool.name for other in drawn):
            drawn.append(offer)
    return drawn


def declare(system: str, chosen: Sequence[Offer]) -> list[Message]:
    """Return the messages before the first turn: a system prompt, if there is one, and the functions."""
    lines = {"role": "tools", "content": "\n".join(offer.tool.line() for offer in chosen)}
    return [{"role": "system", "content": system}, lines] if system else [lines]


def called(tool: Tool, task: Task) -> list[Message]:
    """Return the messages of a question and its calls."""
    text = "\n".join(call_text(tool.name, arguments) for arguments in task.calls)
    return [{"role": "user", "content": task.user}, {"role": "assistant", "content": text}]


def answered(task: Task) -> list[Message]:
    """Return the messages of the results and the answer."""
    results = [{"role": "tool", "content": result} for result in task.results]
    return [*results, {"role": "assistant", "content": task.answer}]


def _spoken(turns: Turn | list[Turn], who: Persona) -> list[Message]:
    pairs = [turns] if isinstance(turns, Turn) else turns
    return [
        each
        for turn in pairs
        for each in ({"role": "user", "content": turn.user}, {"role": "assistant", "content": who.style(turn)})
    ]


def ordinary(rng: Random, kinds: set[str], who: Persona) -> list[Message]:
    """Return a turn, or a few, that need none of the offered kinds of functions."""
    choice = rng.random()
    if choice < 0.2 and "calculator" not in kinds:
        return _spoken(skills.sums(rng), who)
    if choice < 0.3 and kinds <= {"calculator", "extract"}:
        return _spoken(facts.unknown(rng), who)
    if choice < 0.45 and "simple" not in kinds and "search" not in kinds:
        make = rng.choice([make for make, kind in ((weather, "weather"), (clock, "clock"), (stock, "stock"),
                           (translate, "translate")) if kind not in kinds] or [calculator])  # fmt: skip
        if make is not calculator:
            task = make(rng, False).ask(rng, False)
            return _spoken(Turn(task.user, say(rng, facts.UNKNOWN_ANSWERS)), who)
    if choice < 0.6 and "extract" not in kinds:
        turn = who.memory.state(rng) if rng.random() < 0.5 else who.memory.recall(rng)
        return _spoken(turn, who)
    skill = rng.choices([skill for skill, _ in ORDINARY], [weight for _, weight in ORDINARY])[0]
    return _spoken(skill(rng), who)


JSON_PROMPTS = (
    "Answer in JSON with the fields {f}.|Reply with a JSON object: {f}.|Extract {f} as JSON.|"
    "You extract data. Answer only with JSON that has these keys: {f}.|"
    "Return a JSON object that matches this schema:\n{s}|"
    "As a genius expert, your task is to understand the content and provide the parsed objects in json that match the "
    "following json_schema:\n\n{s}\n\nMake sure to return an instance of the JSON, not the schema itself"
)


def json_dialogue(rng: Random, held: bool = False) -> list[Message]:
    """Return a dialogue in which the answer is a JSON object with the data of a sentence."""
    text, found = person(rng, held)
    types = {"name": "string", "age": "integer", "city": "string"}
    properties = {key: {"title": key.capitalize(), "type": types[key]} for key in found}
    schema = {"properties": properties, "required": list(found), "title": rng.choice(("User", "Person", "UserInfo")),
              "type": "object"}  # fmt: skip
    shown = json.dumps(schema, indent=2 if rng.random() < 0.5 else None)
    system = say(rng, JSON_PROMPTS, f=", ".join(f"{key} ({types[key]})" for key in found), s=shown)
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": say(rng, EXTRACT_LEADS, t=text)},
        {"role": "assistant", "content": json.dumps(found, ensure_ascii=False)},
    ]


def tool_dialogue(rng: Random) -> list[Message]:
    """Return a dialogue with one or two functions, seldom three, of one to four turns."""
    if rng.random() < 0.06:
        return json_dialogue(rng)
    who = persona(rng, name=rng.choice(("none", "none", "none", "neutral", "neutral", "named", "facts")))
    if who.name == "none" and rng.random() < 0.15:
        who = Persona("none", note(rng), who.style, Memory())
    chosen = offers(rng, rng.choice((1, 1, 1, 2, 2, 2, 2, 3)))
    messages = declare(who.system, chosen)
    kinds = {offer.kind for offer in chosen}
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        if rng.random() < 0.33:
            messages += ordinary(rng, kinds, who)
            continue
        offer = rng.choice(chosen)
        task = offer.ask(rng, False)
        messages += called(offer.tool, task) + answered(task)
    return messages
