"""Which regular expressions a grammar keeps as they are meant. No torch.

The compiler refuses some of what it cannot do, and silently leaves out the rest: looking ahead, anchors in the middle,
escapes that it does not know. Expressions with such parts are found here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ESCAPE = r"\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|c[A-Za-z]|.)"
_ATOM = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:<?[=!]|:|P?<\w+>))?|.", re.DOTALL)
_MEMBER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_CLASSES = "dDwWsS"
_CONTROLS = dict(zip("nrtfv0", "\n\r\t\f\v\0", strict=True))


def flaw(pattern: str, *, in_json: bool = False) -> str | None:
    """Why ``pattern`` cannot be kept, or None; syntax is left to the compiler. ``in_json``: for the value of a JSON
    string, which is matched as it is written and without escapes, so that some characters cannot stand in it."""
    atoms = _ATOM.findall(pattern)
    reasons = (reason for atom in atoms if (reason := _flaw_of_atom(atom, in_json)))
    return next(reasons, None) or _misplaced_anchor(atoms)


def dot_within_lines(pattern: str) -> str:
    """``pattern`` with a dot as everybody means it, for a compiler to which it is any character."""
    return "".join(r"[^\n]" if atom == "." else atom for atom in _ATOM.findall(pattern))


def _misplaced_anchor(atoms: Sequence[str]) -> str | None:
    may_begin, ended = True, False
    groups = [(True, False)]  # of each open group: whether it may begin the text, and whether an alternative has ended
    for atom in atoms:
        if atom == "^" and not may_begin:
            return "^ is supported only at the beginning"
        if atom == "$":
            ended = True
        elif atom == "|":
            may_begin, any_ended = groups[-1]
            groups[-1], ended = (may_begin, any_ended or ended), False
        elif atom == ")" and len(groups) > 1:
            may_begin, ended = False, groups.pop()[1] or ended
        elif ended:
            return "$ is supported only at the end"
        elif atom[0] == "(":
            groups.append((may_begin, False))
        else:
            may_begin = atom == "^"
    return None


def _flaw_of_atom(atom: str, in_json: bool) -> str | None:
    if atom in _LOOKS:
        return f"{atom} is not supported"
    is_class = atom[0] == "[" and len(atom) > 1
    members = _MEMBER.findall(atom[1:-1] if is_class else atom)
    for member in members:
        if len(member) == 2 and member[1].isalpha() and member[1] not in _CLASSES and member[1] not in _CONTROLS:
            return f"{member} is not supported"
    if not in_json or (is_class and members[:1] == ["^"]):
        return None
    if is_class:  # the hyphen of a range is no member
        members = [member for i, member in enumerate(members) if member != "-" or i in (0, len(members) - 1)]
    if any(_is_written_alone(member) for member in members):
        return None
    return "quotes, backslashes and control characters are not supported in a JSON string"


def _is_written_alone(member: str) -> bool:
    """Whether JSON can have it in a string without an escape."""
    if member[0] == "\\":
        kind, code = member[1:2], member[2:]
        if kind in _CLASSES:
            return True
        member = _CONTROLS.get(kind, kind)
        if code:
            member = chr(ord(code) & 0x1F) if kind == "c" else chr(int(code, 16))
    return member >= " " and member not in '"\\'
