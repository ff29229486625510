"""How all processes write their log: to standard error, one line a message, whatever is in it. No torch."""

import contextlib
import json
import logging
import os
from datetime import UTC, datetime

from radixserve.configs.schema import LogFormat

_STDOUT_FD = 1

# What a terminal or a reader of lines would obey: control characters, line separators, changes of direction.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS} | {0x0A: "\\n"}
_ESCAPES_IN_TRACES = {code: escape for code, escape in _ESCAPES.items() if code != 0x0A}


class PlainFormatter(logging.Formatter):
    """Escapes control characters, so that nobody who gets a text into a message can forge a line or drive a terminal.
    Only tracebacks have lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_ESCAPES)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_ESCAPES_IN_TRACES)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. ``extra={"facts": {...}}`` of a message becomes members of it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)  # control characters and all else but ASCII are escaped in it


def log_to_stderr(level: str, log_format: LogFormat) -> None:
    """Let the root logger write messages from ``level`` (debug, info, ...) on."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if log_format == "json"
        else PlainFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def announce(log_format: LogFormat, text: str) -> None:
    """Tell people who watch: on standard output, unbuffered, where a full disk or a closed terminal is no reason to
    stop. Programs that read JSON lines get it as one of them."""
    if log_format == "json":
        logging.getLogger("radixserve").info(text)
        return
    with contextlib.suppress(OSError):
        os.write(_STDOUT_FD, text.encode() + b"\n")
