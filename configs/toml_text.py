"""A configuration written out as TOML that ``--config`` reads back to the same one, but for the API keys."""

from __future__ import annotations

import json
from typing import Any

from radixserve.configs.options import table_name
from radixserve.configs.schema import GROUPS, SECRET_OPTIONS, OptionGroup, ServeConfig


def to_toml(config: ServeConfig) -> str:
    return "\n".join(_table(group, config.model_dump(mode="json")) for group in GROUPS)


def _table(group: type[OptionGroup], values: dict[str, Any]) -> str:
    lines = (_line(name, values[name]) for name in group.model_fields)
    return f"[{table_name(group.title())}]\n" + "".join(lines)


def _line(name: str, value: Any) -> str:
    if name in SECRET_OPTIONS and value:
        return f"# {name}: {len(value)} not shown\n"
    # TOML's strings, numbers, booleans and lists of strings are JSON's; it has no null, which is "auto" here.
    literal = json.dumps("auto" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{name} = {literal}\n"
