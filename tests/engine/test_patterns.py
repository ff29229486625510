"""Regular expressions of which the compiler would silently leave out a part are refused."""

import pytest

from radixserve.engine.patterns import dot_within_lines, flaw


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
