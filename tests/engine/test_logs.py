"""One message is one line, whatever somebody gets into it."""

import io
import json
import logging

import pytest

from radixserve.engine.logs import JsonFormatter, PlainFormatter, announce


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


def test_a_json_message_is_an_object_on_one_line_with_its_facts() -> None:
    record = logging.LogRecord("x", logging.WARNING, "file", 1, "a\n\u2028%d", (3,), None)
    record.facts = {"request_id": "r-1", "ttft_s": 0.25}
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert found["time"].endswith("+00:00")
    assert (found["level"], found["logger"], found["message"]) == ("warning", "x", "a\n\u20283")
    assert (found["request_id"], found["ttft_s"]) == ("r-1", 0.25)


def test_a_traceback_is_a_member_of_its_json_message() -> None:
    error = ValueError("two\nlines")
    record = logging.LogRecord("x", logging.ERROR, "file", 1, "failed", (), (ValueError, error, None))
    assert json.loads(JsonFormatter().format(record))["traceback"] == "ValueError: two\nlines"


def test_what_people_are_told_is_a_line_of_the_log_where_programs_read(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    announce("json", "ready\n  at last")
    assert capfd.readouterr().out == "" and caplog.messages == ["ready\n  at last"]
    announce("text", "ready\n  at last")
    assert capfd.readouterr().out == "ready\n  at last\n" and len(caplog.messages) == 1
