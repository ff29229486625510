"""Frames of an event stream whose events have names."""

from __future__ import annotations

from typing import Any

import msgspec


def named_event(event: dict[str, Any]) -> bytes:
    """A frame whose event has the name that ``type`` says."""
    return event_frame(event["type"], event)


def event_frame(name: str, content: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))
