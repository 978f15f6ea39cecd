"""Print held-out figures of the built-in model: `python -m chatcache.builtin.evaluate [--model DIR]`.

Names, operand pairs and words to spell come from the held-out tenth that training never sees; the dialogues
around them come from seeds that training does not use. Everything runs through `transformers`.
"""

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

from chatcache.builtin import model_path
from chatcache.builtin.cases import FIGURES, Case

MAX_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Hold one answer and whether the model ended it by itself."""

    text: str
    ended: bool


class Model:
    """Answer prompts in batches with the plain `transformers` implementation."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a prompt that ends where the assistant begins."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def replies(self, prompts: Sequence[list[int]], temperature: float = 0.0, batch_size: int = 32) -> list[Reply]:
        """Answer prompts; neighbours in length share a batch."""
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
    """Return the share of cases answered rightly, and the wrong answers for reading."""
    rng = Random(f"evaluate:{seed}")
    torch.manual_seed(seed)
    cases = [make(rng) for _ in range(num_cases)]
    replies = model.replies([model.prompt(case.messages) for case in cases], temperature)
    wrong = [f"{case.messages[-1]['content']!r} -> {reply.text!r}" for case, reply in zip(cases, replies, strict=True)
             if not (reply.ended and case.accepts(reply.text))]  # fmt: skip
    return 1 - len(wrong) / num_cases, wrong


def main() -> None:
    """Read the command line and print a table."""
    parser = argparse.ArgumentParser(description="Print held-out figures of the built-in model.")
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
