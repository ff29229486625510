"""Where chat templates run: they come with models, so they may be anybody's. Jinja's sandbox, with limits.

The sandbox keeps a template from Python's attributes and from changing what it is given. It does not keep it from
running for ever or filling the memory; that is done here: every loop, call and joined text looks at a clock, and no
operation may make a text longer than the longest prompt.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# A template that writes more than this has run away; the longest contexts are far shorter.
MAX_RENDERED_CHARS = 64 * 2**20
# The largest conversations take milliseconds.
MAX_RENDER_S = 5.0

# The deadline among a render's variables, under a name that no template can spell.
_DEADLINE = "the deadline"
# Widths in format strings that make one operation write megabytes, or take the width from somewhere else.
_WIDE = re.compile(r"\d{7,}|%[^a-zA-Z]*\*")
_WITH_WIDTHS = ("batch", "center", "indent", "slice", "wordwrap")


def with_deadline(variables: dict[str, Any]) -> dict[str, Any]:
    """``variables`` for a render that begins now."""
    return {**variables, _DEADLINE: time.monotonic() + MAX_RENDER_S}


class Sandbox(ImmutableSandboxedEnvironment):
    """No attribute tricks, no changes to what is passed in, no endless loops, no huge texts out of a small template."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.filters.update({name: _checked_width(self.filters[name]) for name in _WITH_WIDTHS})
        self.filters.update({"each of": _each, "joined": _joined, "replace": _replace, "format": _format})

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        _Metering(self).visit(source)
        return super()._generate(source, *arguments, **options)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_clock(__context)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_method(text, __obj.__name__, (*args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("chat templates must not use **")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _check_size(len(sequence) * count)
        return _checked(super().call_binop(context, operator, left, right))


class _Metering(NodeTransformer):
    """Lets loops and joined texts pass through our filters."""

    def __init__(self, environment: Sandbox):
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter("each of", node.iter, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("joined", nodes.List(node.nodes, lineno=node.lineno), node.lineno)

    def _filter(self, name: str, value: nodes.Node, lineno: int) -> nodes.Filter:
        node = nodes.Filter(value, name, [], [], None, None, lineno=lineno)
        node.set_environment(self._environment)
        return node


@pass_context
def _each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _check_clock(context)
        yield value


@pass_context
def _joined(context: Context, parts: Sequence[Any]) -> str:
    _check_clock(context)
    return str(_checked("".join(map(str, parts))))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    _check_method(str(text), "replace", (old, new))
    return str(text).replace(old, new, -1 if count is None else count)


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text))
    return str(_checked(str(text) % (kwargs or args)))


def _checked_width(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _check_size(value if isinstance(value, int) else 0)
        return function(*args, **kwargs)

    return checked


def _check_method(text: str, name: str, args: Sequence[Any]) -> None:
    """``text.name(*args)`` must not make a huge text."""
    for value in args:
        _check_size(value if isinstance(value, int) else 0)
    if name in ("format", "format_map"):
        _check_format(text)
    elif name == "replace" and len(args) > 1 and len(text) * len(str(args[1])) > MAX_RENDERED_CHARS:
        _check_size(text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        _check_size(len(text) * len(args[0]))


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise TemplateError("the chat template formats with too large a width")


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_RENDERED_CHARS:
        raise TemplateError("the rendered chat template is too long")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


def _check_clock(context: Context) -> None:
    deadline = context.parent.get(_DEADLINE)
    if deadline is not None and time.monotonic() > deadline:
        raise TemplateError(f"the chat template runs longer than {MAX_RENDER_S:g} s")
