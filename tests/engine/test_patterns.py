"""Regular expressions of which the compiler would silently leave out a part are refused."""

import re

import pytest

from radixserve.engine.patterns import dot_within_lines, flaw, written_in_json


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^a$",
        "^a$|^b$",
        "(^a|b$)",
        "^(?:a|b)+$",
        r"^\d{3}-\w+\.[^$^]$",
        r"\^a\$b",
        "[(?=]",
        r"\x41\u0042\cA\n",
        "a)",
    ],
)
def test_patterns_that_are_kept(pattern: str) -> None:
    assert flaw(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "(?= is not"),
        ("a(?!b)", "(?! is not"),
        ("(?<!a)b", "(?<! is not"),
        ("a^b", "^ is supported only"),
        ("(a|^b)c^", "^ is supported only"),
        ("a$b", "$ is supported only"),
        ("(a$|b)c", "$ is supported only"),
        (r"\Aa\Z", r"\A is not"),
        (r"[\h]", r"\h is not"),
    ],
)
def test_patterns_that_would_be_cut_are_refused(pattern: str, reason: str) -> None:
    found = flaw(pattern)
    assert found is not None and found.startswith(reason)


@pytest.mark.parametrize(
    "pattern", ['a"b', r"a\\b", r"\n", r"\x22", r"[\x00-\x1f]", '["-"]', r"[\\]", r"\u000a", r"\cA"]
)
def test_what_json_must_escape_is_refused_in_json_only(pattern: str) -> None:
    assert flaw(pattern) is None
    assert flaw(pattern, in_json=True) is not None


@pytest.mark.parametrize(
    "pattern", ['[^"]', r"[\s]", r"[\x00-\x7f]", r"[\w .,\"'-]+", ".", r"\S", r"[\t -~]", r"\/", "[-]"]
)
def test_what_json_can_write_in_another_way_is_kept(pattern: str) -> None:
    assert flaw(pattern, in_json=True) is None


def test_a_dot_stays_within_a_line() -> None:
    assert dot_within_lines(r"a.b\.[.]") == r"a[^\n]b\.[.]"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (".", "a"),
        ("[^a]", "b"),
        (r"\S", "é"),
        (r"\s", " "),
        (r"\s", "\u3000"),
        (r"\W", "-"),
        (r"\D", "🙂"),
        (r"[\s\S]", "x"),
        (r"[!-\]]", "]"),
        (r"[\x00-\u00ff]", "ÿ"),
        (r"[^\d-]", "."),
    ],
)
def test_classes_in_json_lose_what_json_must_escape_and_nothing_else(pattern: str, text: str) -> None:
    written = re.compile(written_in_json(pattern))
    assert written.fullmatch(text)
    meant = re.compile(pattern, re.ASCII)
    for char in map(chr, range(128)):
        assert bool(written.fullmatch(char)) == bool(meant.fullmatch(char) and char >= " " and char not in '"\\'), char


def test_what_needs_no_change_in_json_has_none() -> None:
    for pattern in ("^[a-z]{2,5}$", r"(?:\d|\w)+\.[-a][a-]", "[éü]"):
        assert written_in_json(pattern) == pattern
