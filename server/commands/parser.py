"""The parser of all commands: mistakes are one line with a suggestion, and help fits the terminal."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from radixserve.configs.errors import OptionError
from radixserve.configs.sources import unknown_flag

_WIDEST = 120


class Parser(argparse.ArgumentParser):
    """Raises ``OptionError``. ``behind_dashes``: flags that belong to another parser, which gets what follows --."""

    def __init__(self, *, behind_dashes: Collection[str] = (), **options: Any) -> None:
        defaults = {"usage": "%(prog)s [options]", "formatter_class": _HelpFormatter, "allow_abbrev": False}
        super().__init__(**{**defaults, **options})
        self._behind_dashes = behind_dashes

    def parse_args(  # type: ignore[override]  # always into a namespace of its own
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args)
        if unknown:
            raise self.unknown(unknown[0])
        return found

    def unknown(self, argument: str) -> OptionError:
        """What to tell about ``argument``, which this parser does not know."""
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return OptionError(f"unexpected argument {name}")
        if name in self._behind_dashes:
            return OptionError(f"{name} is an option of `radixserve serve`; those follow --: {self.prog} -- {argument}")
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        return unknown_flag(name, flags, f"{self.prog} --help")

    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps paragraphs, and never breaks a word or an option in two."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(_WIDEST, shutil.get_terminal_size().columns))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.replace("``", "`").split("\n\n")
        return "\n\n".join("\n".join(self._split_lines(paragraph, width)) for paragraph in paragraphs)
