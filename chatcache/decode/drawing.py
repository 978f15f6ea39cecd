"""From a request's sampling parameters to what is asked of the logits, for all strategies that draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chatcache.decode.actions import DrawSpec
from chatcache.decode.constraint import Constraint, Guide
from chatcache.decode.penalties import LogitEdits
from chatcache.decode.stop import StopRules, Trail
from chatcache.types.params import SamplingParams


class Drawing:
    """What every branch of one request is drawn by: `spec` and `edits` at its root, and how they change on the way."""

    def __init__(
        self,
        params: SamplingParams,
        rules: StopRules,
        constraint: Constraint | None,
        *,
        seed: int,
        prompt: Sequence[int],
        width: int = 1,
    ) -> None:
        self._rules = rules
        self._constraint = constraint
        self.spec = DrawSpec(
            width=width,
            seed=seed,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            num_top=params.logprobs or 0,
        )
        bannable = rules.terminal_ids if rules.min_tokens > 0 and constraint is None else ()
        self.edits = LogitEdits(params, prompt, bannable)

    @property
    def steady(self) -> bool:
        """True when no branch is ever drawn otherwise than by its spec."""
        return self.edits.empty and self._constraint is None

    def at(self, spec: DrawSpec, edits: LogitEdits, trail: Trail, guide: Guide | None) -> DrawSpec:
        """Return the draw of a branch that has come to `trail`."""
        edit = edits.edit(ban=trail.num_tokens < self._rules.min_tokens)
        if self._constraint is not None:
            return replace(spec, edit=edit, mask=self._constraint.mask(guide, trail.num_tokens))
        return spec if edit is None else replace(spec, edit=edit)
