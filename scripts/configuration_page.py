"""Writes docs/configuration.md from the schema: ``python scripts/configuration_page.py``."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from radixserve.configs.options import OPTIONS, Option, table_name
from radixserve.configs.sources import PRESETS_FOLDER, preset_names

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

(Written by `scripts/configuration_page.py` from `configs/schema.py`; a test compares.)

Every option of `radixserve serve` can come from five places. The first that has it wins:

1. a flag, `--max-model-len 4096`;
2. an environment variable, `RADIXSERVE_MAX_MODEL_LEN=4096` (an empty one counts as not set);
3. a TOML file, `--config FILE` or `RADIXSERVE_CONFIG`;
4. a preset, `--preset NAME` or `RADIXSERVE_PRESET`;
5. the default.

Lists are comma separated, or the flag is given repeatedly. Switches are `--flag` and `--no-flag`, and `true` or `false`
elsewhere. An option whose default depends on the model or the machine takes the word `auto` for it. In a TOML file the
keys stand at the top or under the table of their group:

```toml
[model]
model = "smollm2-135m-instruct"
served_model_name = ["small", "default"]

[scheduler]
max_num_seqs = 64
```

Unknown flags, variables and keys are errors (exit status 2). `radixserve serve --print-config` prints what is in
effect as such a file, without API keys, and exits.
"""


def render() -> str:
    groups = groupby(OPTIONS.values(), key=lambda option: option.group)
    return "\n".join([_INTRODUCTION, *(_table(group, list(options)) for group, options in groups), _presets()])


def _table(group: str, options: list[Option]) -> str:
    rows = (f"| `{_spelling(o)}` | {_default(o)} | {_values(o)} | {o.description} |\n" for o in options)
    head = f"## {group}: `[{table_name(group)}]`\n\n| flag | default | values | |\n|---|---|---|---|\n"
    return head + "".join(rows)


def _spelling(option: Option) -> str:
    return f"--[no-]{option.flag[2:]}" if option.is_switch else option.flag


def _default(option: Option) -> str:
    return "" if option.default == () else f"`{json.dumps('auto' if option.default is None else option.default)}`"


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.is_list:
        return "list"
    return {bool: "switch", int: "integer", float: "number"}.get(option.value_type, "text")


def _presets() -> str:
    files = ((name, (PRESETS_FOLDER / f"{name}.toml").read_text()) for name in preset_names())
    return "## Presets\n" + "".join(f"\n`--preset {name}`\n\n```toml\n{text}```\n" for name, text in files)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
