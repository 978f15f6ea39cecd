"""Driver of transformers: `generate`, and kept keys and values for extended prompts."""

from __future__ import annotations

from typing import Any

import torch
from serve import folder, num_threads, serve  # type: ignore[import-not-found]  # in the same folder


class Engine:
    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads())
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.bfloat16)
        self.model.eval()
        self.last: tuple[list[int], Any] | None = None

    def generate(self, prompts: list[list[int]], max_tokens: int, n: int) -> int:
        if max_tokens == 1 and n == 1 and len(prompts) == 1:
            return self._first(prompts[0])
        self.last = None
        options = {"do_sample": True, "num_return_sequences": n} if n > 1 else {"do_sample": False}
        return self._run(prompts, max_tokens, options)

    def beam(self, prompt: list[int], width: int, max_tokens: int) -> int:
        self.last = None
        return self._run([prompt], max_tokens, {"num_beams": width, "num_return_sequences": width, "do_sample": False})

    def _run(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> int:
        ids = torch.tensor(prompts)  # all of one length
        mask = torch.ones_like(ids)
        lengths = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "pad_token_id": 0}
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, **lengths, **options)
        return int(out[:, ids.shape[1] :].numel())

    @torch.inference_mode()
    def _first(self, prompt: list[int]) -> int:
        """Compute one token, reusing the last prompt's keys and values if this prompt extends it."""
        past, new = None, prompt
        if self.last is not None and prompt[: len(self.last[0])] == self.last[0]:
            past, new = self.last[1], prompt[len(self.last[0]) :]
        out = self.model(input_ids=torch.tensor([new]), past_key_values=past, use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        self.last = (prompt, out.past_key_values)
        return 1


if __name__ == "__main__":
    serve(Engine())
