"""One message is one line, whatever somebody gets into it."""

import io
import logging

import pytest

from radixserve.engine.logs import PlainFormatter


def logged(message: str, *arguments: object, error: Exception | None = None) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    info = (type(error), error, None) if error else None
    handler.emit(logging.LogRecord("x", logging.INFO, "file", 1, message, arguments, info))
    return stream.getvalue()


@pytest.mark.parametrize("evil", ["\n", "\r", "\x1b[2J", "\x00", "\x9b31m", "\u2028", "\u202e", "\x7f", "\v"])
def test_control_characters_are_escaped_and_lines_cannot_be_forged(evil: str) -> None:
    text = logged("model %s is unknown", f"a{evil}ERROR forged")
    assert text.endswith(" is unknown\n") and text.count("\n") == 1 and len(text.splitlines()) == 1
    assert evil[0] not in text[:-1] and "\\" in text


def test_other_writing_is_left_alone() -> None:
    assert logged("größer 漢字 🙂 %d", 3) == "INFO größer 漢字 🙂 3\n"


def test_tracebacks_keep_their_lines_but_no_escapes() -> None:
    text = logged("failed", error=ValueError("two\nlines\x1b[2J"))
    assert text == "INFO failed\nValueError: two\nlines\\x1b[2J\n"
