"""What a chat template may spend. It is a program of the model's author and runs where every request passes.

Jinja's sandbox keeps a template from Python; it does not keep it from running for ever, or from making a string that
fills the memory. Here every turn of a loop and every call of a macro looks at the clock, and whatever can make much
out of little (repetition, powers, padding, joining) is asked first how long its result would be.

How long a value would be if it was written out, or gone through in C, where no meter ticks.

A list that holds another twice, which holds another twice, and so on, takes a few words of memory and more time than
there is to print, to hash or to compare with its like.
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
_ENTRY = 32  # what an entry takes beside its text: a quarter of a million of them are too many, and soon counted
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
    """A template takes more time or memory than any chat needs."""


def is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def estimate_size(value: Any) -> int:
    """About the characters of a value written out, counted as often as it is there; not much beyond `MAX_LENGTH`."""
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
    """Refuse what would be too long. Raises: TemplateCostError."""
    for value in values:
        if is_container(value) and estimate_size(value) * times > MAX_LENGTH:
            raise TemplateCostError(
                f"the chat template makes a value of more than {MAX_LENGTH} characters with its entries"
            )


def check_comparison(left: Any, right: Any) -> None:
    """Two values are gone through in step: it is over as soon as the shorter is. Raises: TemplateCostError."""
    if is_container(left) and is_container(right) and estimate_size(left) > MAX_LENGTH:
        check_size(right)


def check_search(value: Any, within: Any) -> None:
    """A value is hashed, or compared with each entry. Raises: TemplateCostError."""
    check_size(value, times=max(1, len(within)) if is_container(within) else 1)


def checked(value: Any) -> Any:
    """The value, if it is not too long. Raises: TemplateCostError."""
    check_size(value)
    return value


def compared(names: Sequence[str], *values: Any) -> Any:
    """Compare as Python does, one after another."""
    found: Any = True
    for name, left, right in zip(names, values, values[1:], strict=False):
        (check_search if name in ("in", "notin") else check_comparison)(left, right)
        found = _COMPARISONS[name](left, right)
        if not found:
            break
    return found


def with_short_search(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def bounded(value: Any, other: Any) -> Any:
        check_comparison(value, other)
        check_search(value, other)
        return made(value, other)

    return bounded


def _entries(value: Iterable[Any]) -> Iterator[Any]:
    return chain(value.keys(), value.values()) if isinstance(value, dict) else iter(value)


MAX_RENDER_S = 5.0  # thousands of long messages take a tenth of that
MAX_RENDER_CHARS = 32 << 20
MAX_EXPONENT = 64
MAX_BITS = 4096
TICK = "_chatcache_tick"
JOIN = "_chatcache_join"
COMPARE = "_chatcache_compare"
KEY = "_chatcache_key"
OURS = (TICK, JOIN, COMPARE, KEY)
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_PADDING_FILTERS = ("center", "indent", "slice", "batch", "wordwrap", "round", "format", "filesizeformat")
# These look at the entries alone; whatever else takes a value may write it out, hash it or compare it.
_SHALLOW = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random"),
        *("reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    }
)
_FIELD = re.compile(r"%[-+ #0\d.*]*|\{[^{}]*")  # what may carry a width
_NESTED = re.compile(r"\{[^{}]*\{|%[-+ #0\d.]*\*")  # a width that an argument decides


class RenderBudget:
    """Time of one rendering; called at every turn of a loop."""

    __slots__ = ("_end_s", "_num_calls")

    def __init__(self, max_s: float = MAX_RENDER_S) -> None:
        self._end_s = time.thread_time() + max_s
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls % 16 == 0 and time.thread_time() > self._end_s:
            raise TemplateCostError("the chat template does not come to an end")


class CostLimiter(NodeTransformer):
    """Put a look at the meter into every loop and macro, and make `~` a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(JOIN, [nodes.List(node.nodes, lineno=node.lineno)], node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        values = [node.expr, *(each.expr for each in node.ops)]
        if any(map(_is_plain, values)):  # which ends every comparison soon
            return node
        names: list[nodes.Expr] = [nodes.Const(each.op, lineno=node.lineno) for each in node.ops]
        return _call(COMPARE, [nodes.List(names, lineno=node.lineno), *values], node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not _is_plain(node.key):
            node.key = _call(KEY, [node.key], node.lineno)
        return node

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call(TICK, [], node.lineno), lineno=node.lineno)
        node.body = [tick, *node.body]
        found: nodes.Node = node
        return found


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), args, [], None, None, lineno=line)


def _is_plain(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_plain, node.items))
    return isinstance(node, nodes.Const)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no expression makes a value out of all proportion."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=checked, **kwargs)
        self.globals.pop("lipsum", None)
        self.globals.update({JOIN: _joined, COMPARE: compared, KEY: checked})
        tests: dict[str, Any] = self.tests
        tests.update({name: with_short_search(tests[name]) for name in COMPARING_TESTS})
        for name in _PADDING_FILTERS:
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters["join"] = _with_short_list(self.filters["join"])
        self.filters["replace"] = _replaced
        for name, made in list(self.filters.items()):
            self.add_filter(name, made)

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        self.filters[name] = _with_short_result(made, takes_all=name in _SHALLOW)

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_search(argument, obj)
        return super().getitem(obj, argument)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Put together what a block or a macro wrote."""
        return "".join(_short_list(pieces))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Look at the widths before a text's own `format` does."""
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
            case "+" if _sized(left) and _sized(right):
                _check_length(len(left) + len(right))
            case "*":
                _check_product(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_number(right, MAX_EXPONENT)
                _check_number(left.bit_length(), MAX_BITS // MAX_EXPONENT)
            case "%" if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args:
                args = (_short_list(args[0], len(owner)), *args[1:])
            elif name == "replace" and len(args) > 1:
                _check_replace(owner, args[0], args[1])
            elif name in _PADDING:
                _check_format("", (*args, *kwargs.values()))
        if not isinstance(obj, Macro | RenderBudget) and obj is not compared:
            is_holder = isinstance(obj, type) and issubclass(obj, Namespace)  # of what it is given by name
            for arg in args if is_holder else (*args, *kwargs.values()):
                check_search(arg, owner)
        return _short(super().call(context, obj, *args, **kwargs))


def _sized(value: Any) -> bool:
    return isinstance(value, Sized) and not isinstance(value, dict)


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TemplateCostError(f"the chat template makes a value of {length} characters or entries")


def _check_number(value: int, most: int) -> None:
    if abs(value) > most:
        raise TemplateCostError("the chat template computes with a number that is far too large")


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and _sized(other):
            _check_length(len(other) * max(one, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() + right.bit_length(), MAX_BITS)


def _check_format(form: str, args: Iterable[Any]) -> None:
    """Refuse padding to a great width, named in the format or handed to it, and formats that say a text very often."""
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


def _short_list(values: Iterable[Any], num_between: int = 0) -> list[Any]:
    """Return the values to be joined, counted while they come."""
    found: list[Any] = []
    length = 0
    for value in values:
        length += num_between + estimate_size(value)
        _check_length(length)
        found.append(value)
    return found


def _joined(values: Sequence[Any]) -> str:
    return "".join(_short_list([str(value) for value in _short_list(values)]))


def _replaced(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = str(value)
    _check_replace(text, str(old), new)
    return text.replace(str(old), str(new), -1 if count is None else count)


def _with_small_numbers(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args[1:], *kwargs.values()):
            if isinstance(arg, int):
                _check_length(abs(arg))
        if args and isinstance(args[0], str) and made.__name__ == "do_format":
            _check_format(args[0], (*args[1:], *kwargs.values()))
        return made(*args, **kwargs)

    return checked


def _short(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _with_short_result(made: Callable[..., Any], *, takes_all: bool) -> Callable[..., Any]:
    @wraps(made)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if not takes_all:
            check_size(*args, *kwargs.values())
        return _short(made(*args, **kwargs))

    return bounded


def _with_short_list(made: Callable[..., Any]) -> Callable[..., Any]:
    """Bound a join: (context, values, between, attribute)."""

    @wraps(made)
    def checked(context: Any, value: Any, d: Any = "", *args: Any, **kwargs: Any) -> Any:
        return made(context, _short_list(value, len(str(d))), d, *args, **kwargs)

    return checked
