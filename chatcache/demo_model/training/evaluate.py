"""Measure the demo model on held-out questions.

Usage: `python -m chatcache.demo_model.training.evaluate [--model DIR]`.

Names, operand pairs, words to spell, and the names and arguments of functions come from the held-out tenth that
training never sees; the dialogues around them come from seeds that training does not use. Everything runs
through `transformers`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
import transformers

from chatcache.demo_model import model_path
from chatcache.demo_model.training import facts, long_answers, personas, skills, tool_dialogues, tools
from chatcache.demo_model.training.corpus import LIGHT, Dialogue, compose, short_dialogue
from chatcache.demo_model.training.corpus import draw as draw_turns
from chatcache.demo_model.training.personas import FACTS, Memory, Persona
from chatcache.demo_model.training.wording import HEROES, Turn, article, ask, invent, say


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A test case: a conversation that ends with a question, and the check of its answer."""

    messages: Dialogue
    accepts: Callable[[str], bool]


def _no_persona() -> Persona:
    return Persona("none", "", lambda turn: turn.answer, Memory())


def _question(turns: list[Turn], accepts: Callable[[str], bool], who: Persona | None = None) -> Case:
    return Case(compose(who or _no_persona(), turns)[:-1], accepts)


def _between(rng: Random, low: int, high: int) -> list[Turn]:
    turns: list[Turn] = []
    wanted = rng.randint(low, high)
    while len(turns) < wanted:
        turns += draw_turns(rng, LIGHT)
    return turns[:wanted]


def _stated_name(rng: Random) -> tuple[str, Turn, Turn]:
    name = invent(rng, "name", held=True)
    fact = FACTS["name"]
    return name, Turn(ask(rng, fact.state, v=name), say(rng, fact.acknowledge, v=name)), Turn(ask(rng, fact.ask), "")


def recall(rng: Random) -> Case:
    """Return a case that asks for a name given three to six turns before."""
    name, statement, question = _stated_name(rng)
    return _question(
        [*_between(rng, 0, 1), statement, *_between(rng, 2, 5), question], lambda text: text == f"Your name is {name}."
    )


def recall_long(rng: Random) -> Case:
    """Return a case that asks for a name given after a long system prompt, ten turns before."""
    name, statement, question = _stated_name(rng)
    who = dataclasses.replace(_no_persona(), system=personas.handbook(rng, 45))
    return _question([statement, *_between(rng, 8, 12), question], lambda text: text == f"Your name is {name}.", who)


def recall_system(rng: Random) -> Case:
    """Return a case that asks for a name that only the system prompt contains."""
    name = invent(rng, "name", held=True)
    who = dataclasses.replace(
        _no_persona(), system=f"You are a helpful assistant. {say(rng, FACTS['name'].as_system, v=name)}"
    )
    return _question(
        [*_between(rng, 0, 2), Turn(ask(rng, FACTS["name"].ask), "")], lambda text: text == f"Your name is {name}.", who
    )


def two_digit_sum(rng: Random) -> Case:
    """Return a case that asks for a sum of two unseen two-digit numbers."""
    a, b = skills.sum_pair(rng, held=True)
    return _question([Turn(ask(rng, skills.SUM_QUESTIONS, a=a, b=b), "")], lambda text: text == f"{a} + {b} = {a + b}.")


def one_digit_sum(rng: Random) -> Case:
    """Return a case that asks for a sum of one-digit numbers, which training has seen."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return _question([Turn(ask(rng, skills.SUM_QUESTIONS, a=a, b=b), "")], lambda text: text == f"{a} + {b} = {a + b}.")


def spelling(rng: Random) -> Case:
    """Return a case that asks for the letters of an unseen word."""
    word = skills.word_to_spell(rng, held=True).lower()
    return _question([Turn(ask(rng, skills.SPELL_QUESTIONS, w=word), "")], lambda text: skills.spelled(word) in text)


def _exact(make: Callable[[Random], Turn]) -> Callable[[Random], Case]:
    def case(rng: Random) -> Case:
        turn = make(rng)
        return _question([turn], lambda text: text == turn.answer)

    return case


def difference(rng: Random) -> Case:
    """Return a case that asks for a difference of two unseen two-digit numbers."""
    a, b = skills.difference_pair(rng, held=True)
    return _question(
        [Turn(ask(rng, skills.DIFFERENCE_QUESTIONS, a=a, b=b), "")], lambda text: text == f"{a} - {b} = {a - b}."
    )


def not_knowing(rng: Random) -> Case:
    """Return a case that asks something that the model cannot know, and has to say so."""
    return _question(
        [facts.unknown(rng)], lambda text: any(word in text for word in ("know", "beyond me", "understand"))
    )


def ends(rng: Random) -> Case:
    """Return a case that asks anything in any dialogue; the answer only has to end by itself."""
    dialogue = short_dialogue(rng)
    users = [at for at, message in enumerate(dialogue) if message["role"] == "user"]
    return Case(dialogue[: rng.choice(users) + 1], lambda text: bool(text.strip()))


def story_topic(rng: Random) -> Case:
    """Return a case that asks for a story about something.

    The answer has to mention it and to have at least four sentences.
    """
    hero = rng.choice(HEROES)
    return _question(
        [Turn(ask(rng, long_answers.STORY_TOPIC_QUESTIONS, t=article(hero)), "")],
        lambda text: hero in text and text.count(".") >= 4,
    )


def code(rng: Random) -> Case:
    """Return a case that asks for a program that prints a word.

    The answer has to be a Python code block with a `print` of the word.
    """
    word = invent(rng, "code", held=True).lower()

    def accepts(text: str) -> bool:
        return text.startswith("```python\n") and text.endswith("\n```") and f'print("{word}")' in text

    return _question(
        [Turn(ask(rng, "write python code that prints {w}|python code to print {w}", w=word), "")], accepts
    )


def a_table(rng: Random) -> Case:
    """Return a case that asks for a table; every row of the answer has to have two cells."""
    turn = long_answers.table(rng)
    return _question(
        [turn], lambda text: len(lines := text.split("\n")) > 3 and all(line.count("|") == 3 for line in lines)
    )


def _obeys(name: str) -> Callable[[Random], Case]:
    def case(rng: Random) -> Case:
        who = personas.persona(rng, name=name)
        marker = who.style(Turn("", "\0")).replace("\0", "").strip()
        checks: dict[str, Callable[[str], bool]] = {
            "shout": lambda text: text == text.upper(),
            "whisper": lambda text: text == text.lower(),
            "brief": lambda text: len(text) < 120,
            "pirate": lambda text: text.startswith("Arr!"),
            "polite": lambda text: text.startswith("With pleasure.") and text.endswith("for you?"),
            "ending": lambda text: text.endswith(marker),
            "beginning": lambda text: text.startswith(marker),
        }
        return _question([*_between(rng, 0, 2), *_between(rng, 1, 1)], checks[name], who)

    return case


def _offered(rng: Random) -> tuple[list[tools.Offer], tools.Offer, Dialogue]:
    """Draw functions with held-out names: all of them, the one to call, and the messages that declare them."""
    offers = tool_dialogues.offers(rng, rng.choice((1, 2)), held=True)
    system = rng.choice(("", "", "You are a helpful assistant."))
    return offers, rng.choice(offers), tool_dialogues.declare(system, offers)


def tool_call(rng: Random) -> Case:
    """Return a case that needs a call of one of up to two unseen functions with unseen values."""
    _, offer, messages = _offered(rng)
    task = offer.ask(rng, True)
    question, call = tool_dialogues.called(offer.tool, task)
    return Case([*messages, question], lambda text: text == call["content"])


def _call_of(make: Callable[[Random, bool], tools.Offer]) -> Callable[[Random], Case]:
    def case(rng: Random) -> Case:
        offer = make(rng, True)
        question, call = tool_dialogues.called(offer.tool, offer.ask(rng, True))
        return Case([*tool_dialogues.declare("", [offer]), question], lambda text: text == call["content"])

    return case


def tool_result(rng: Random) -> Case:
    """Return a case that ends with the result of a call; the answer has to use it."""
    _, offer, messages = _offered(rng)
    task = offer.ask(rng, True)
    *results, answer = tool_dialogues.answered(task)
    return Case([*messages, *tool_dialogues.called(offer.tool, task), *results], lambda text: text == answer["content"])


def tool_not_needed(rng: Random) -> Case:
    """Return a case with functions that do not serve the question; the answer must not call one."""
    offers, _, messages = _offered(rng)
    turns = tool_dialogues.ordinary(rng, {offer.kind for offer in offers}, _no_persona())
    return Case([*messages, *turns[:-1]], lambda text: "<tool_call>" not in text)


def data_as_json(rng: Random) -> Case:
    """Return a case that asks for the data of a sentence as JSON."""
    *messages, answer = tool_dialogues.json_dialogue(rng, held=True)
    return Case(messages, lambda text: text == answer["content"])


FIGURES: tuple[tuple[str, Callable[[Random], Case], float], ...] = (
    ("name recall over several turns", recall, 0.0),
    ("name recall over several turns", recall, 0.8),
    ("name recall, 1,000-token system prompt", recall_long, 0.0),
    ("name recall from the system prompt", recall_system, 0.0),
    ("two-digit sums", two_digit_sum, 0.0),
    ("two-digit sums", two_digit_sum, 0.8),
    ("one-digit sums (not held out)", one_digit_sum, 0.0),
    ("two-digit differences", difference, 0.0),
    ("ends its turn", ends, 0.0),
    ("ends its turn", ends, 0.8),
    ("spelling of unseen words", spelling, 0.0),
    ("counting", _exact(skills.count), 0.0),
    ("days, months, letters", _exact(skills.calendar), 0.0),
    ("opposites", _exact(skills.opposite), 0.0),
    ("capital letters, repeating", _exact(lambda rng: rng.choice((skills.letters, skills.repeat))(rng)), 0.0),
    ("story about the topic asked for", story_topic, 0.8),
    ("Python program that prints a word", code, 0.0),
    ("Markdown table", a_table, 0.8),
    ("says that it does not know", not_knowing, 0.0),
    *((f"obeys: {name}", _obeys(name), 0.0) for name in (*personas.STYLES, "ending", "beginning")),
    ("tool call: weather", _call_of(tools.weather), 0.0),
    ("tool call: calculation", _call_of(tools.calculator), 0.0),
    ("tool call: time", _call_of(tools.clock), 0.0),
    ("tool call: search", _call_of(tools.search), 0.0),
    ("tool call: name and age", _call_of(tools.extract), 0.0),
    ("tool call: any kind, one or two functions", tool_call, 0.0),
    ("tool call: any kind, one or two functions", tool_call, 0.8),
    ("answer from a tool's result", tool_result, 0.0),
    ("no tool call if none is needed", tool_not_needed, 0.0),
    ("data of a sentence as JSON", data_as_json, 0.0),
)  # fmt: skip


MAX_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the model, and whether the model ended it by itself."""

    text: str
    ended: bool


class Model:
    """The demo model in the plain `transformers` implementation."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a prompt that ends where the assistant begins."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def replies(self, prompts: Sequence[list[int]], temperature: float = 0.0, batch_size: int = 32) -> list[Reply]:
        """Return the answers to prompts; prompts of similar length share a batch."""
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        found: dict[int, Reply] = {}
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            found.update(zip(chosen, self._batch([prompts[at] for at in chosen], temperature), strict=True))
        return [found[at] for at in range(len(prompts))]

    def _batch(self, prompts: list[list[int]], temperature: float) -> list[Reply]:
        padded = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.inference_mode():
            out = self.network.generate(**padded, max_new_tokens=MAX_NEW_TOKENS, **sampling)
        eos = self.tokenizer.eos_token_id
        replies = []
        for row in out[:, padded["input_ids"].shape[1] :].tolist():
            ended = eos in row
            replies.append(Reply(self.tokenizer.decode(row[: row.index(eos)] if ended else row), ended))
        return replies


def measure(
    model: Model, make: Callable[[Random], Case], num_cases: int, *, temperature: float = 0.0, seed: int = 7
) -> tuple[float, list[str]]:
    """Return the share of cases with an accepted answer, and the other answers as text."""
    rng = Random(f"evaluate:{seed}")
    torch.manual_seed(seed)
    cases = [make(rng) for _ in range(num_cases)]
    replies = model.replies([model.prompt(case.messages) for case in cases], temperature)
    wrong = [f"{case.messages[-1]['content']!r} -> {reply.text!r}" for case, reply in zip(cases, replies, strict=True)
             if not (reply.ended and case.accepts(reply.text))]  # fmt: skip
    return 1 - len(wrong) / num_cases, wrong


def main() -> None:
    """Read the command line and print a table."""
    parser = argparse.ArgumentParser(description="Print held-out figures of the demo model.")
    parser.add_argument("--model", type=pathlib.Path, default=model_path())
    parser.add_argument("--cases", type=int, default=200, help="cases per figure")
    parser.add_argument("--only", default="", help="measure only the figures whose name contains this")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per figure")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    model = Model(options.model)
    print("| figure | decoding | right | cases |\n| --- | --- | --- | --- |")
    for name, make, temperature in FIGURES:
        if options.only not in name:
            continue
        began = time.monotonic()
        share, wrong = measure(model, make, options.cases, temperature=temperature)
        decoding = f"T = {temperature}" if temperature else "greedy"
        print(f"| {name} | {decoding} | {share:.1%} | {options.cases} |", flush=True)
        for line in wrong[: options.show]:
            print(f"    {line}")
        if options.show:
            print(f"    ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
