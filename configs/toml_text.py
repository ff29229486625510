"""A configuration written out as TOML that ``--config`` reads back to the same one (but for masked secrets)."""

from __future__ import annotations

import json
from typing import Any

from radixserve.configs.options import table_name
from radixserve.configs.schema import GROUPS, ServeConfig


def to_toml(config: ServeConfig) -> str:
    values = config.model_dump(mode="json")
    tables = (
        f"[{table_name(group.title())}]\n"
        + "".join(f"{name} = {_literal(values[name])}\n" for name in group.model_fields)
        for group in GROUPS
    )
    return "\n".join(tables)


def _literal(value: Any) -> str:
    """TOML's strings, numbers, booleans and arrays of strings are JSON's; it has no null, which is "auto" here."""
    return json.dumps("auto" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
