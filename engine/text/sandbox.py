"""Where chat templates run: they come with models, so they may be anybody's. Jinja's sandbox, with limits.

The sandbox keeps a template from Python's attributes and from changing what it is given. It does not keep it from
running for ever or filling the memory; that is done here: every loop, call and joined text looks at a clock, and no
operation may make a text longer than the longest prompt, a list longer than any conversation, or a huge number. Lists
may hold one thing many times, so their text is measured before it is written.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# A template that writes more than this has run away; the longest contexts are far shorter.
MAX_RENDERED_CHARS = 64 * 2**20
# What an entry of a list or a dictionary counts for, besides its text.
_ENTRY_CHARS = 256
_MAX_NUMBER_BITS = 4096
# The largest conversations take milliseconds.
MAX_RENDER_S = 5.0

# The deadline among a render's variables, under a name that no template can spell.
_DEADLINE = "the deadline"
# Widths in format strings that make one operation write megabytes, or take the width from somewhere else.
_WIDE = re.compile(r"\d{7,}|%[^a-zA-Z]*\*|\{[\w.\[\]]*(?:![ars])?:[^{}]*\{")
_TEXT_FILTERS = (
    "capitalize center e escape filesizeformat float forceescape format indent int join lower replace string striptags "
    "title trim truncate upper urlencode wordcount xmlattr"
).split()
_GENERATORS = ("batch", "map", "slice")  # of what is not there yet, as other filters have it
# Without use for a chat, and hard to bound.
_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap")
_REFUSED_METHODS = ("expandtabs", "format_map", "translate")


def with_deadline(variables: dict[str, Any]) -> dict[str, Any]:
    """``variables`` for a render that begins now."""
    return {**variables, _DEADLINE: time.monotonic() + MAX_RENDER_S}


class Sandbox(ImmutableSandboxedEnvironment):
    """No attribute tricks, no changes to what is passed in, no endless loops, no huge texts out of a small template."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any):
        super().__init__(finalize=_writable, **options)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters.update(
            {"each of": _each, "joined": _joined, "replace": _replace, "format": _format, "list": _list}
        )
        self.filters.update({name: _checked_text(self.filters[name]) for name in _TEXT_FILTERS})
        self.filters.update({name: _checked_items(self.filters[name]) for name in _GENERATORS})

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        _Metering(self).visit(source)
        return super()._generate(source, *arguments, **options)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_clock(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox of Jinja has a function around ``str.format``
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            if method.__name__ == "join" and args:
                args = ([*_counted(args[0])], *args[1:])
            _check_method(text, method.__name__, (*args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("chat templates must not use **")
        if operator == "%" and isinstance(left, str):
            _check_format(left, "%", right)
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _check_size(_own_size(sequence) * count)
            is_product = isinstance(left, int) and isinstance(right, int)
            if is_product and left.bit_length() + right.bit_length() > _MAX_NUMBER_BITS:
                raise TemplateError("the chat template computes with too large a number")
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
    _writable(parts)
    return "".join(map(str, parts))


def _list(values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | bytes | range):
        _check_size(len(values) * _ENTRY_CHARS)
    return list(values)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    _check_method(str(text), "replace", (old, new))
    return str(text).replace(old, new, -1 if count is None else count)


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text), "%", kwargs or args)
    return str(_checked(str(text) % (kwargs or args)))


def _checked_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes a text of what it is given."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        options = [*args[1:], *kwargs.values()]
        width = sum(value if isinstance(value, int) else _written_size(value) for value in options)
        lines = 1 + (args[0].count("\n") if function.__name__ == "do_indent" and isinstance(args[0], str) else 0)
        _check_size(_written_size(args) + width * lines)
        return function(*args, **kwargs)

    return checked


def check_json(value: Any, indent: object) -> None:
    """``value`` must not come to a huge text as JSON, with that ``indent``."""
    width = indent if isinstance(indent, int) else len(str(indent or ""))
    _check_size(_written_size(value) * (1 + width))


def _checked_items(function: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for value in (*args, *kwargs.values()):
            _check_size(value * _ENTRY_CHARS if isinstance(value, int) else 0)
        return _counted(function(*args, **kwargs))

    return checked


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """``values``, as long as they do not come to too much."""
    size = 0
    for value in values:
        size += _ENTRY_CHARS + _written_size(value)
        _check_size(size)
        yield value


def _check_method(text: str, name: str, args: Sequence[Any]) -> None:
    """``text.name(*args)`` must not make a huge text."""
    if name in _REFUSED_METHODS:
        raise TemplateError(f"chat templates must not use {name}")
    for value in args:
        _check_size(value if isinstance(value, int) else 0)
    if name == "format":
        _check_format(text, "{", args)
    elif name == "replace" and len(args) > 1 and len(text) * len(str(args[1])) > MAX_RENDERED_CHARS:
        _check_size(text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args:
        _check_size(len(text) * len(args[0]))


def _check_format(text: str, field: str, values: Any) -> None:
    """``field``: what begins one in ``text``, each of which may write all the ``values``."""
    if _WIDE.search(text):
        raise TemplateError("the chat template formats with too large a width")
    _check_size(text.count(field) * _written_size(values))


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_RENDERED_CHARS:
        raise TemplateError("the rendered chat template is too long")


def _own_size(value: str | list[Any] | tuple[Any, ...]) -> int:
    return len(value) if isinstance(value, str) else len(value) * _ENTRY_CHARS


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(_own_size(value))
    return value


def _writable(value: Any) -> Any:
    """What is about to become text."""
    _check_size(_written_size(value))
    return value


def _written_size(value: Any) -> int:
    """Characters that ``value`` comes to as text, roughly; no more than just above the limit are counted."""
    if isinstance(value, str):
        return len(value)
    size, rest = 0, [value]
    while rest and size <= MAX_RENDERED_CHARS:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item)
            continue
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, Mapping):
            item = [*item.keys(), *item.values()]
        if isinstance(item, list | tuple | set):
            size += _ENTRY_CHARS * len(item)
            if size <= MAX_RENDERED_CHARS:
                rest.extend(item)
    return size


def _check_clock(context: Context) -> None:
    deadline = context.parent.get(_DEADLINE)
    if deadline is not None and time.monotonic() > deadline:
        raise TemplateError(f"the chat template runs longer than {MAX_RENDER_S:g} s")
