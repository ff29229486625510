"""Where options come from, and how they are written out.

Flags win over ``RADIXSERVE_*`` variables, these over the config file, the preset, defaults.
Every mistake is an ``OptionError`` that names the flag, variable or key and what is allowed there.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from radixserve.configs.errors import OptionError
from radixserve.configs.options import OPTIONS, VARIABLE_PREFIX, flag_of, table_name, variable_of
from radixserve.configs.schema import GROUPS, SECRET_OPTIONS, OptionGroup, ServeConfig

PRESETS_FOLDER = Path(__file__).parent / "presets"

# Not options themselves: they say where options are.
CONFIG_VARIABLE = variable_of("config")
PRESET_VARIABLE = variable_of("preset")

# What Kubernetes adds to every pod beside a service whose name begins with radixserve.
_SERVICE_LINK = re.compile(r"RADIXSERVE(_.*)?_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*)")


@dataclass(frozen=True, slots=True)
class Layer:
    """Options from one place. ``values``: option name -> value, text allowed; ``where`` names an option there."""

    values: Mapping[str, Any]
    where: Callable[[str], str]


def flag_layer(values: Mapping[str, Any]) -> Layer:
    return Layer(values, flag_of)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """All ``RADIXSERVE_*`` variables. An empty one counts as not set."""
    values = {
        variable.removeprefix(VARIABLE_PREFIX).lower(): text
        for variable, text in environ.items()
        if variable.startswith(VARIABLE_PREFIX)
        and text
        and variable not in (CONFIG_VARIABLE, PRESET_VARIABLE)
        and not _is_service_link(variable, text)
    }
    return Layer(values, variable_of)


def _is_service_link(variable: str, text: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(variable)) or (variable.endswith("_PORT") and "://" in text)


def file_layer(path: Path) -> Layer:
    """The keys of a TOML file, at its top or under the table of their group."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read config file {path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise OptionError(f"config file {path} is not valid TOML: {error}") from error
    return Layer(_flatten(document, path), lambda name: f"key {name} in {path}")


def preset_layer(preset: str) -> Layer:
    names = preset_names()
    if preset not in names:
        raise OptionError(f"unknown preset {preset!r}{_suggest(preset, names)}; there are {', '.join(names)}")
    return file_layer(PRESETS_FOLDER / f"{preset}.toml")


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.toml"))


def merge(layers: Iterable[Layer]) -> ServeConfig:
    """One configuration from ``layers``, first wins. Raises ``OptionError``, with one line for each mistake."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer in layers:
        for name, value in layer.values.items():
            if name not in OPTIONS:
                raise OptionError(f"unknown option {layer.where(name)}{_suggest(name, OPTIONS, layer.where)}")
            if name not in origin:
                values[name] = _prepare(name, value)
                origin[name] = layer.where(name)
                if name in SECRET_OPTIONS and value != [] and values[name] == ():
                    # As from --api-key "$KEY" without that variable: nobody wants an open server then.
                    raise OptionError(f"{origin[name]} has no key in it; leave it out to let everyone in")
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise OptionError("\n".join(_explain(mistake, origin) for mistake in error.errors())) from error


def unknown_flag(flag: str, known: Iterable[str], help_command: str) -> OptionError:
    return OptionError(f"unknown option {flag}{_suggest(flag, known) or f' ({help_command} lists them)'}")


def to_toml(config: ServeConfig) -> str:
    """A configuration as TOML that ``--config`` reads back to the same one, but for the API keys."""
    return "\n".join(_table(group, config.model_dump(mode="json")) for group in GROUPS)


def _flatten(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    tables = {table_name(group.title()): group for group in GROUPS}
    values: dict[str, Any] = {}
    for key, value in document.items():
        members = value.items() if isinstance(value, dict) else [(key, value)]
        if isinstance(value, dict) and key not in tables:
            raise OptionError(f"unknown table [{key}] in {path}{_suggest(key, tables, '[{}]'.format)}")
        for name, member in members:
            if isinstance(value, dict) and name in OPTIONS and name not in tables[key].model_fields:
                right = table_name(OPTIONS[name].group)
                raise OptionError(f"key {name} in {path} belongs to table [{right}], not [{key}]")
            if name in values:
                raise OptionError(f"key {name} in {path} is given twice")
            values[name] = member
    return values


def _prepare(name: str, value: Any) -> Any:
    """Undo what text cannot say: lists come as "a,b" (or as a list of such), and None as "auto"."""
    option = OPTIONS[name]
    if option.is_list and isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    if option.is_list and isinstance(value, (list, tuple)):
        return tuple(part for item in value for part in (_prepare(name, item) if isinstance(item, str) else (item,)))
    return None if option.default is None and value == "auto" else value


def _explain(mistake: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    message = str(mistake["msg"]).removeprefix("Value error, ")
    if not mistake["loc"]:  # about several options, which it names
        return message
    name = str(mistake["loc"][0])
    allowed = message.replace("Input should", "it should", 1).partition(", unable to")[0]
    shown = "this" if name in SECRET_OPTIONS else repr(mistake["input"])
    return f"{origin[name]}: {shown} is not allowed, {allowed}"


def _suggest(word: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    known = list(known)
    # An option is cut short more often than misspelt.
    close = [name for name in known if name.startswith(word)] or get_close_matches(word, known, n=1)
    return f"; did you mean {show(close[0])}?" if close else ""


def _table(group: type[OptionGroup], values: dict[str, Any]) -> str:
    lines = (_line(name, values[name]) for name in group.model_fields)
    return f"[{table_name(group.title())}]\n" + "".join(lines)


def _line(name: str, value: Any) -> str:
    if name in SECRET_OPTIONS and value:
        return f"# {name}: {len(value)} not shown\n"
    # TOML's strings, numbers, booleans and lists of strings are JSON's; it has no null, which is "auto" here.
    literal = json.dumps("auto" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{name} = {literal}\n"
