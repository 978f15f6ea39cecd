"""Compose whole dialogues: a system prompt, a user with a memory, and turns from every skill.

The generator is the training set: one seed gives one endless stream, with nothing to download. Values whose
hash falls into the held-out tenth are never told, added or spelled here, so that the figures of `evaluate.py` are
honest.
"""

from collections.abc import Callable, Iterator
from random import Random

from chatcache.builtin import arithmetic, glossary, knowledge, language, markup, stories, trivia, unknown
from chatcache.builtin.knowledge import SELF
from chatcache.builtin.memory import FACTS, Memory
from chatcache.builtin.personas import STYLES_AFTER, Persona, change_style, persona
from chatcache.builtin.text import Turn, ask

Message = dict[str, str]
Dialogue = list[Message]
Skill = Callable[[Random], Turn | list[Turn]]

# weights are shares of turns; sums and spelling need the most practice per unit of skill
SKILLS: tuple[tuple[Skill, float], ...] = (
    (arithmetic.sums, 20), (arithmetic.drill, 12), (arithmetic.too_large, 1.5), (arithmetic.compare, 3),
    (arithmetic.count, 9), (arithmetic.puzzle, 1), (arithmetic.dice, 0.7),
    (language.spell, 14), (language.letters, 6), (language.repeat, 6), (language.calendar, 4),
    (language.opposite, 2.5), (language.rhyme, 2), (language.color_of, 2), (language.sound, 1),
    (language.capital, 2), (language.choose, 2),
    (stories.story, 4), (stories.poem, 2), (stories.joke, 1.5), (stories.small_talk, 6),
    (markup.bullets, 4), (markup.table, 2), (markup.program, 4),
    (knowledge.about, 5), (glossary.term, 5), (trivia.trivia, 3), (unknown.unknown, 6),
)  # fmt: skip
# turns that are short enough to fill the time between telling and recalling
LIGHT: tuple[tuple[Skill, float], ...] = (
    (arithmetic.sums, 10), (arithmetic.drill, 1), (arithmetic.compare, 2),
    (language.spell, 3), (arithmetic.count, 1), (language.repeat, 1), (language.calendar, 2), (language.opposite, 2),
    (language.color_of, 1), (language.capital, 2), (language.choose, 1), (stories.small_talk, 6), (knowledge.about, 2),
    (glossary.term, 2), (trivia.trivia, 1), (unknown.unknown, 2), (markup.bullets, 1), (stories.joke, 1),
)  # fmt: skip


def draw(rng: Random, skills: tuple[tuple[Skill, float], ...]) -> list[Turn]:
    """Return the turns of one skill, chosen by weight."""
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
                _joined(who.memory.tell(rng) if rng.random() < 0.4 else draw(rng, LIGHT)[0], draw(rng, LIGHT)[0])
            )
        else:
            drawn = draw(rng, skills)
            # the ready-made introduction does not know a name given by the system prompt
            turns += [] if who.assistant_name and drawn[0].answer == SELF else drawn
    if remembering > 0.5 and who.memory.values:
        turns.append(who.memory.recall(rng))
    return turns


def _remember(rng: Random, memory: Memory) -> Turn:
    """Tell or ask for one fact or two."""
    untold = len(FACTS) - len(memory.values)
    if rng.random() < 0.45 or not memory.values:
        return memory.tell_two(rng) if untold > 1 and rng.random() < 0.15 else memory.tell(rng)
    if len(memory.values) > 1 and rng.random() < 0.15:
        return memory.recall_two(rng)
    return memory.recall_all(rng) if rng.random() < 0.06 else memory.recall(rng)


def _quote(rng: Random, turns: list[Turn]) -> Turn:
    """Ask for the first or the last question of this dialogue."""
    if rng.random() < 0.5:
        question = ask(
            rng, "what did i just say?|what did i just ask?|what was my last question?|repeat my last message"
        )
        return Turn(question, f'You wrote: "{turns[-1].user}"', plain=True)
    question = ask(rng, "what was my first question?|what did i ask first?|what was my first message?")
    return Turn(question, f'You wrote: "{turns[0].user}"', plain=True)


def _joined(one: Turn, two: Turn) -> Turn:
    """Put two questions into one message."""
    mark = "" if one.user[-1] in ".?!" else "."
    return Turn(f"{one.user}{mark} {two.user[0].upper()}{two.user[1:]}", f"{one.answer} {two.answer}", plain=True)


def compose(who: Persona, turns: list[Turn]) -> Dialogue:
    """Write the messages of a dialogue, every answer in the style of its persona."""
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
    """Return a dialogue that fills a large part of the context: many turns, a long system prompt, or both."""
    num_handbook = rng.choice((0, rng.randint(10, 30), rng.randint(30, 75)))
    who = persona(rng, num_handbook=num_handbook)
    num_turns = rng.randint(8, 60) if num_handbook < 30 else rng.randint(2, 20)
    return compose(who, _turns(rng, who, num_turns, remembering=rng.choice((0.1, 0.3, 0.7))))


def stream(seed: int, *, long_share: float = 0.0) -> Iterator[Dialogue]:
    """Yield dialogues for ever; the same seed gives the same dialogues on every machine."""
    rng = Random(seed)
    while True:
        yield long_dialogue(rng) if rng.random() < long_share else short_dialogue(rng)
