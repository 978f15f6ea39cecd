"""Time and memory limits for chat templates.

A chat template is a program that comes with the model and runs for every request. Jinja's sandbox keeps it from Python
internals, but not from endless loops or from strings that fill the memory. `CostLimiter` therefore inserts a check of
the time budget into every loop and macro, and `BoundedEnvironment` computes the size of a result before operations that
can produce much from little (repetition, powers, padding, joining) are executed.

Sizes are those of the written-out value: a list that contains another list twice, which contains another twice, and so
on, needs little memory but takes exponential time to print, hash or compare, all in C, where no budget is checked.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import wraps
from itertools import chain
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_LENGTH = 8 << 20  # characters or entries of one value made within
_ENTRY = 32  # cost of an entry in addition to its text; limits a value to about 260,000 entries
_DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, *_DICT_VIEWS)

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
COMPARING_TESTS = frozenset(
    ["==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge", "in"]
)


class TemplateCostError(SecurityError):
    """The template exceeded its limits of time or memory."""


def is_container(value: Any) -> bool:
    """Return True for lists, tuples, dicts, sets and dict views."""
    return isinstance(value, _CONTAINERS)


def estimate_size(value: Any) -> int:
    """Estimate the characters of a value when written out.

    Stops counting soon after `MAX_LENGTH`.
    """
    if not is_container(value):
        return len(value) if isinstance(value, str) else 1
    total = 0
    walks: list[Iterator[Any]] = [_entries(value)]
    while walks:
        for each in walks[-1]:
            total += _ENTRY + (len(each) if isinstance(each, str) else 0)
            if total > MAX_LENGTH:
                return total
            if is_container(each):
                walks.append(_entries(each))
                break
        else:
            walks.pop()
    return total


def check_size(*values: Any, times: int = 1) -> None:
    """Raise TemplateCostError if a value, written `times` times, exceeds MAX_LENGTH."""
    for value in values:
        if is_container(value) and estimate_size(value) * times > MAX_LENGTH:
            raise TemplateCostError(
                f"the chat template makes a value of more than {MAX_LENGTH} characters with its entries"
            )


def check_comparison(left: Any, right: Any) -> None:
    """Raise TemplateCostError if comparing two containers takes too long.

    The shorter one bounds the time.
    """
    if is_container(left) and is_container(right) and estimate_size(left) > MAX_LENGTH:
        check_size(right)


def check_search(value: Any, within: Any) -> None:
    """Raise TemplateCostError if hashing a value or searching for it in a container is too slow."""
    check_size(value, times=max(1, len(within)) if is_container(within) else 1)


def checked_value(value: Any) -> Any:
    """Return the value. Raises: TemplateCostError if it is too large."""
    check_size(value)
    return value


def compare(names: Sequence[str], *values: Any) -> Any:
    """Evaluate a chained comparison (`a < b in c`) after checking its cost.

    The compiled template calls this function for every comparison. `names`: Jinja's names of the operators.
    """
    found: Any = True
    for name, left, right in zip(names, values, values[1:], strict=False):
        (check_search if name in ("in", "notin") else check_comparison)(left, right)
        found = _COMPARISONS[name](left, right)
        if not found:
            break
    return found


def with_bounded_search(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def bounded(value: Any, other: Any) -> Any:
        check_comparison(value, other)
        check_search(value, other)
        return made(value, other)

    return bounded


def _entries(value: Iterable[Any]) -> Iterator[Any]:
    return chain(value.keys(), value.values()) if isinstance(value, dict) else iter(value)


MAX_RENDER_S = 5.0  # thousands of long messages take about 0.5 s
MAX_RENDER_CHARS = 32 << 20
MAX_EXPONENT = 64
MAX_BITS = 4096
TICK = "_chatcache_tick"
JOIN = "_chatcache_join"
COMPARE = "_chatcache_compare"
KEY = "_chatcache_key"
RESERVED_NAMES = (TICK, JOIN, COMPARE, KEY)
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_PADDING_FILTERS = ("center", "indent", "slice", "batch", "wordwrap", "round", "format", "filesizeformat")
# Filters that only walk the top level of their value. All others may write it out, hash it or compare it.
_SHALLOW_FILTERS = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random"),
        *("reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    }
)
_FIELD = re.compile(r"%[-+ #0\d.*]*|\{[^{}]*")  # format fields, which may have a width
_NESTED = re.compile(r"\{[^{}]*\{|%[-+ #0\d.]*\*")  # fields whose width is an argument


class RenderBudget:
    """Time budget of one rendering.

    The template calls it in every iteration of a loop; the call raises TemplateCostError once the time is used up.
    """

    __slots__ = ("_end_s", "_num_calls")

    def __init__(self, max_s: float = MAX_RENDER_S) -> None:
        self._end_s = time.thread_time() + max_s
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls % 16 == 0 and time.thread_time() > self._end_s:
            raise TemplateCostError("the chat template does not terminate")


class CostLimiter(NodeTransformer):
    """Rewrites the syntax tree of a template so that its cost is checked.

    Budget checks are inserted into loops and macros; `~`, comparisons and dict keys become calls that check sizes.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_budget_check(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_budget_check(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_budget_check(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(JOIN, [nodes.List(node.nodes, lineno=node.lineno)], node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        values = [node.expr, *(each.expr for each in node.ops)]
        if any(map(_is_constant, values)):  # a constant bounds the cost of every comparison
            return node
        names: list[nodes.Expr] = [nodes.Const(each.op, lineno=node.lineno) for each in node.ops]
        return _call(COMPARE, [nodes.List(names, lineno=node.lineno), *values], node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not _is_constant(node.key):
            node.key = _call(KEY, [node.key], node.lineno)
        return node

    def _with_budget_check(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call(TICK, [], node.lineno), lineno=node.lineno)
        node.body = [tick, *node.body]
        found: nodes.Node = node
        return found


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), args, [], None, None, lineno=line)


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja sandbox that bounds the size of every value a template can make."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=checked_value, **kwargs)
        self.globals.pop("lipsum", None)
        self.globals.update({JOIN: _join, COMPARE: compare, KEY: checked_value})
        tests: dict[str, Any] = self.tests
        tests.update({name: with_bounded_search(tests[name]) for name in COMPARING_TESTS})
        for name in _PADDING_FILTERS:
            self.filters[name] = _with_bounded_numbers(self.filters[name])
        self.filters["join"] = _with_bounded_list(self.filters["join"])
        self.filters["replace"] = _replace
        for name, made in list(self.filters.items()):
            self.add_filter(name, made)

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        self.filters[name] = _with_bounded_result(made, takes_all=name in _SHALLOW_FILTERS)

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_search(argument, obj)
        return super().getitem(obj, argument)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a block or macro; raise TemplateCostError if it is too large."""
        return "".join(_bounded_list(pieces))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check the field widths before `str.format` runs."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            given = args[0].values() if value.__name__ == "format_map" and args else (*args, *kwargs.values())
            _check_format(value.__self__, given)
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if _has_length(left) and _has_length(right):
                _check_length(len(left) + len(right))
            case "*":
                _check_product(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_number(right, MAX_EXPONENT)
                _check_number(left.bit_length(), MAX_BITS // MAX_EXPONENT)
            case "%" if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        return _bounded_result(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args:
                args = (_bounded_list(args[0], len(owner)), *args[1:])
            elif name == "replace" and len(args) > 1:
                _check_replace(owner, args[0], args[1])
            elif name in _PADDING:
                _check_format("", (*args, *kwargs.values()))
        if not isinstance(obj, Macro | RenderBudget) and obj is not compare:
            is_holder = isinstance(obj, type) and issubclass(obj, Namespace)  # stores its keyword arguments unchanged
            for arg in args if is_holder else (*args, *kwargs.values()):
                check_search(arg, owner)
        return _bounded_result(super().call(context, obj, *args, **kwargs))


def _has_length(value: Any) -> bool:
    return isinstance(value, Sized) and not isinstance(value, dict)


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TemplateCostError(f"the chat template makes a value of {length} characters or entries")


def _check_number(value: int, most: int) -> None:
    if abs(value) > most:
        raise TemplateCostError("the chat template computes with a number that is far too large")


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and _has_length(other):
            _check_length(len(other) * max(one, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() + right.bit_length(), MAX_BITS)


def _check_format(form: str, args: Iterable[Any]) -> None:
    """Raise TemplateCostError for large field widths and many repetitions of a long text."""
    args = tuple(args)
    for field in _FIELD.findall(form):
        for number in re.findall(r"\d+", field):
            _check_length(int(number[:20]))
    if not form or _NESTED.search(form):
        for arg in args:
            _check_length(abs(arg) if isinstance(arg, int) else 0)
    longest = max((estimate_size(arg) for arg in args if isinstance(arg, Sized)), default=0)
    _check_length(len(_FIELD.findall(form)) * longest)


def _check_replace(text: str, old: Any, new: Any) -> None:
    times = text.count(old) if isinstance(old, str) else 0
    _check_length(len(text) + times * len(str(new)))


def _bounded_list(values: Iterable[Any], num_between: int = 0) -> list[Any]:
    """Collect values to be joined; raise TemplateCostError once their total length is too large."""
    found: list[Any] = []
    length = 0
    for value in values:
        length += num_between + estimate_size(value)
        _check_length(length)
        found.append(value)
    return found


def _join(values: Sequence[Any]) -> str:
    return "".join(_bounded_list([str(value) for value in _bounded_list(values)]))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = str(value)
    _check_replace(text, str(old), new)
    return text.replace(str(old), str(new), -1 if count is None else count)


def _with_bounded_numbers(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args[1:], *kwargs.values()):
            if isinstance(arg, int):
                _check_length(abs(arg))
        if args and isinstance(args[0], str) and made.__name__ == "do_format":
            _check_format(args[0], (*args[1:], *kwargs.values()))
        return made(*args, **kwargs)

    return checked


def _bounded_result(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _with_bounded_result(made: Callable[..., Any], *, takes_all: bool) -> Callable[..., Any]:
    @wraps(made)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if not takes_all:
            check_size(*args, *kwargs.values())
        return _bounded_result(made(*args, **kwargs))

    return bounded


def _with_bounded_list(made: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Jinja's `join` filter with a check of the length of its result."""

    @wraps(made)
    def checked(context: Any, value: Any, d: Any = "", *args: Any, **kwargs: Any) -> Any:
        return made(context, _bounded_list(value, len(str(d))), d, *args, **kwargs)

    return checked
