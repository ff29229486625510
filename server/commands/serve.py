"""``radixserve serve``: reads the options and runs the supervisor. The flags are those of the schema."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from radixserve.configs import sources
from radixserve.configs.errors import OptionError
from radixserve.configs.options import OPTIONS, Option
from radixserve.configs.schema import ServeConfig
from radixserve.engine.logs import log_to_stderr
from radixserve.server.commands.parser import Parser
from radixserve.server.supervisor import Commands, RestartPolicy, serve

_DESCRIPTION = """\
Serve a model over the OpenAI API. Options come from flags, then RADIXSERVE_* variables, then --config, then --preset.
"auto" stands for the default of an option that has none of its own; lists are comma separated or given repeatedly."""


def run(arguments: Sequence[str]) -> int:
    flags = parse_flags(arguments)
    config = read_config(flags, os.environ)
    if flags["print_config"]:
        print(sources.to_toml(config), end="")
        return 0
    log_to_stderr(config.log_level, config.log_format)
    return serve(config, Commands(), RestartPolicy())


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """The flags that were given, by option name, as text; and ``config``, ``preset`` and ``print_config``."""
    flags = vars(build_parser().parse_args([_with_hyphens(argument) for argument in arguments]))
    positional = flags.pop("positional_model")
    if positional is not None and flags.setdefault("model", positional) != positional:
        raise OptionError(f"two models: {positional} and --model {flags['model']}")
    return flags


def read_config(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServeConfig:
    layers = [
        sources.flag_layer({name: value for name, value in flags.items() if name in OPTIONS}),
        sources.environment_layer(environ),
    ]
    if config_file := flags["config"] or environ.get(sources.CONFIG_VARIABLE):
        layers.append(sources.file_layer(Path(config_file)))
    if preset := flags["preset"] or environ.get(sources.PRESET_VARIABLE):
        layers.append(sources.preset_layer(preset))
    return sources.merge(layers)


def build_parser() -> Parser:
    parser = Parser(prog="radixserve serve", usage="radixserve serve [MODEL] [options]", description=_DESCRIPTION)
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with options [{sources.CONFIG_VARIABLE}]")
    presets = "{" + ",".join(sources.preset_names()) + "}"
    parser.add_argument("--preset", metavar=presets, help=f"named set of options [{sources.PRESET_VARIABLE}]")
    parser.add_argument("--print-config", action="store_true", help="print the options in effect as TOML and exit")
    for group, options in groupby(OPTIONS.values(), key=lambda option: option.group):
        section = parser.add_argument_group(group)
        for option in options:
            _add_flag(section, option)
    return parser


def _add_flag(section: argparse._ArgumentGroup, option: Option) -> None:
    help_text = f"{option.help} [{option.variable}]".replace("%", "%%")
    if option.is_switch:
        section.add_argument(
            option.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
        )
        return
    action = "append" if option.is_list else "store"
    section.add_argument(option.flag, action=action, default=argparse.SUPPRESS, metavar=option.metavar, help=help_text)


def _with_hyphens(argument: str) -> str:
    """Let ``--max_model_len=5`` be ``--max-model-len=5``, as other servers do."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
