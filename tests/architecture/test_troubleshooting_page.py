"""The messages that docs/troubleshooting.md explains are those that the code has."""

from __future__ import annotations

import ast
import re

from radixserve.tests.architecture.source_tree import ROOT, modules

# What stands in for a value: dots on the page, and whatever an f-string puts there.
_VALUE = re.compile(r"\.\.\.|\d+")


def texts_of_the_code() -> str:
    """All texts, those of f-strings without their values."""
    found = []
    for module in modules():
        for node in ast.walk(module.tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            constants = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
            found.append("\n".join(constants))
    return "\n".join(found)


def test_explained_messages_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| (?:header )?`(.*?)`(?: \(\d+\))? \|", page, re.MULTILINE)
    assert len(messages) > 15
    code = texts_of_the_code()
    missing = [
        (message, fragment.strip())
        for message in messages
        for fragment in _VALUE.split(message)
        if len(fragment.strip()) > 3 and fragment.strip(" :()") not in code
    ]
    assert missing == []
