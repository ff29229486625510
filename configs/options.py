"""What flags, environment, TOML files and documentation need to know of each option, read off the schema."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from radixserve.configs.schema import GROUPS

VARIABLE_PREFIX = "RADIXSERVE_"


@dataclass(frozen=True, slots=True)
class Option:
    """One field of ``ServeConfig``. ``group`` is the heading that it stands under, ``choices`` is empty for free
    values; an option whose ``default`` is None accepts the word "auto" for it."""

    name: str
    group: str
    description: str
    default: Any
    value_type: type
    choices: tuple[str, ...]
    is_list: bool
    flag: str
    variable: str

    @property
    def is_switch(self) -> bool:
        return self.value_type is bool

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {int: "N", float: "X"}.get(self.value_type, "TEXT")

    @property
    def help(self) -> str:
        """The description, with the default where it does not tell it by itself."""
        if "default:" in self.description or self.default in (None, ()):
            return self.description
        shown = {True: "on", False: "off"}[self.default] if self.is_switch else self.default
        return f"{self.description} (default: {shown})"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return VARIABLE_PREFIX + name.upper()


def table_name(group: str) -> str:
    """The TOML table of a group: "KV cache" -> "kv_cache"."""
    return group.lower().replace(" ", "_")


def _option(name: str, group: str, field: FieldInfo) -> Option:
    annotation = field.annotation
    if get_origin(annotation) is UnionType:
        (annotation,) = (member for member in get_args(annotation) if member is not NoneType)
    is_list = get_origin(annotation) is tuple
    return Option(
        name=name,
        group=group,
        description=field.description or "",
        default=field.default,
        value_type=annotation if isinstance(annotation, type) and not is_list else str,
        choices=get_args(annotation) if get_origin(annotation) is Literal else (),
        is_list=is_list,
        flag=flag_of(name),
        variable=variable_of(name),
    )


OPTIONS: dict[str, Option] = {
    name: _option(name, group.title(), field) for group in GROUPS for name, field in group.model_fields.items()
}
