"""Reasoning controls of a request: how they reach the chat template, and the budget that the engine enforces.

    reasoning_effort, reasoning.effort, output_config.effort      variables of the template: the level, or its switch
    enable_thinking, thinking                                     variables of the template: its switch
    chat_template_kwargs                                          variables of the template, as they are
    thinking_token_budget, thinking.budget_tokens                 the engine ends the reasoning
    preserve_thinking                                             earlier replies keep their reasoning in the prompt

A control that changes nothing for the model is named as ignored. A request without reasoning is never answered with it:
if the template has no switch, the engine ends the reasoning before its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.schemas.requests import ThinkingFields
from chatcache.tokenizer.thinking import EFFORT, KWARGS, LEVELS, NONE, SWITCHES, ThinkingControls
from chatcache.types.request import Params

BUDGET = "thinking_token_budget"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The resolved controls of a request.

    `kwargs`: variables of the chat template. `budget`: the most tokens of reasoning; None for no limit. `preserves`:
    whether earlier replies keep their reasoning; None for the default. `effort`: the level that is in effect, if the
    request has one. `ignored`: names of the controls without effect.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    preserves: bool | None = None
    effort: str | None = None
    ignored: tuple[str, ...] = ()


NO_THINKING = Thinking()


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """A request's wish for reasoning or none, and the name of the field that has it."""

    is_on: bool
    name: str


def parse_thinking(fields: ThinkingFields, controls: ThinkingControls) -> Thinking:
    """Resolve the fields of OpenAI's and vLLM's APIs. Raises: InvalidRequestError, UnsupportedParameterError."""
    effort, effort_name = fields.reasoning_effort, EFFORT
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        effort, effort_name = fields.reasoning.effort, "reasoning.effort"
    kwargs = dict(fields.chat_template_kwargs or {})
    switch = None if fields.enable_thinking is None else ThinkingSwitch(fields.enable_thinking, SWITCHES[0])
    for name in SWITCHES:
        if isinstance(kwargs.get(name), bool) and not controls.reads(name):
            switch = switch or ThinkingSwitch(kwargs.pop(name), f"{KWARGS}.{name}")
            kwargs.pop(name, None)
    return resolve_thinking(
        controls,
        switch=switch,
        effort=effort,
        effort_name=effort_name,
        kwargs=kwargs,
        budget=fields.thinking_token_budget,
        preserves=fields.preserve_thinking,
    )


def resolve_thinking(
    controls: ThinkingControls,
    *,
    switch: ThinkingSwitch | None = None,
    effort: str | None = None,
    effort_name: str = EFFORT,
    kwargs: Mapping[str, Any] | None = None,
    budget: int | None = None,
    budget_name: str = BUDGET,
    preserves: bool | None = None,
) -> Thinking:
    """Resolve controls for a model.

    Raises: InvalidRequestError for an invalid value, UnsupportedParameterError for reasoning that cannot be prevented.
    """
    if effort is not None and effort not in (NONE, *LEVELS):
        allowed = ", ".join((NONE, *LEVELS))
        raise InvalidRequestError(f"{effort_name} must be one of {allowed}, got {effort[:40]!r}", param=effort_name)
    if effort == NONE:
        if switch is not None and switch.is_on:
            raise InvalidRequestError(f"{effort_name} none and {switch.name} exclude each other", param=effort_name)
        switch = ThinkingSwitch(is_on=False, name=effort_name)
    variables: dict[str, Any] = {}
    ignored: list[str] = []
    if switch is not None and not switch.is_on:
        if controls.off is not None:
            variables |= controls.off
        elif controls.can_reason:
            budget = 0
        else:
            raise UnsupportedParameterError(
                f"{switch.name}: this model's chat template cannot switch its reasoning off", param=switch.name
            )
        effort = NONE if effort is not None else None
    else:
        effort = _switch_on(controls, switch, effort, effort_name, variables, ignored)
    for name in kwargs or {}:
        if not controls.reads(name):
            ignored.append(f"{KWARGS}.{name}")
    variables |= kwargs or {}
    if kwargs:
        controls.check_kwargs(variables)
    if budget is not None and not controls.can_reason:
        ignored.append(budget_name)
        budget = None
    if preserves and not controls.can_reason:
        ignored.append("preserve_thinking")
    return Thinking(variables, budget, preserves, effort, tuple(ignored))


def _switch_on(
    controls: ThinkingControls,
    switch: ThinkingSwitch | None,
    effort: str | None,
    effort_name: str,
    variables: dict[str, Any],
    ignored: list[str],
) -> str | None:
    """Add the variables for reasoning and its effort; return the level in effect."""
    if switch is not None or effort is not None:
        variables |= controls.on
    if switch is not None and not controls.on and not controls.can_reason:
        ignored.append(switch.name)
    if effort is None:
        return None
    level = controls.nearest_level(effort)
    if level is not None:
        variables[EFFORT] = level
    elif not controls.changes_prompt(controls.on):
        ignored.append(effort_name)
    return level


def limit_thinking(
    params: Params, thinking: Thinking, controls: ThinkingControls, prompt: Sequence[int], num_prefix_tokens: int = 0
) -> Params:
    """Add the thinking budget to the parameters of a request.

    `num_prefix_tokens`: how many tokens at the end of the prompt belong to the reply.
    """
    marks = None if thinking.budget is None else controls.marks(prompt, num_prefix_tokens)
    if marks is None:
        return params
    return msgspec.structs.replace(params, thinking_token_budget=thinking.budget, thinking_marks=marks)
