"""Which regular expressions a grammar keeps as they are meant. No torch.

The compiler refuses some of what it cannot do, and silently leaves out the rest: looking ahead, anchors in the middle,
escapes that it does not know. Expressions with such parts are found here. In JSON it lets control characters and quotes
through where an expression has characters beyond ASCII or counts of thousands, so classes are written without them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

Points = tuple[int, int]  # code points from the first to the last

_ESCAPE = r"\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|c[A-Za-z]|.)"
_ATOM = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:<?[=!]|:|P?<\w+>))?|.", re.DOTALL)
_MEMBER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_CONTROLS = dict(zip("nrtfv0", "\n\r\t\f\v\0", strict=True))
_LAST_POINT = 0x10FFFF
_NOT_WRITTEN: list[Points] = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]  # control characters, the quote, the backslash
_SPACES = "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES: dict[str, list[Points]] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [*((ord(space), ord(space)) for space in _SPACES), (0x2000, 0x200A)],
}


def flaw(pattern: str, *, in_json: bool = False) -> str | None:
    """Why ``pattern`` cannot be kept, or None; syntax is left to the compiler. ``in_json``: for the value of a JSON
    string, which is matched as it is written and without escapes, so that some characters cannot stand in it."""
    atoms = _ATOM.findall(pattern)
    reasons = (reason for atom in dict.fromkeys(atoms) if (reason := _flaw_of_atom(atom, in_json)))
    return next(reasons, None) or _misplaced_anchor(atoms)


def dot_within_lines(pattern: str) -> str:
    """``pattern`` with a dot as everybody means it, for a compiler to which it is any character."""
    return "".join(r"[^\n]" if atom == "." else atom for atom in _ATOM.findall(pattern))


def written_in_json(pattern: str) -> str:
    """``pattern``, in which ``flaw`` finds none, for the value of a JSON string: its classes and dots without the
    characters that JSON writes with an escape."""
    atoms = _ATOM.findall(pattern)
    written = {atom: _written(atom) for atom in set(atoms)}
    return "".join(written[atom] for atom in atoms)


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
    members = _MEMBER.findall(atom[1:-1] if _is_class(atom) else atom)
    for member in members:
        if len(member) == 2 and member[1].isalpha() and member[1].lower() not in {*_CLASSES, *_CONTROLS}:
            return f"{member} is not supported"
    if in_json and not list(_gaps([*_gaps(_points(atom)), *_NOT_WRITTEN])):
        return "quotes, backslashes and control characters are not supported in a JSON string"
    return None


def _is_class(atom: str) -> bool:
    return atom[0] == "[" and len(atom) > 1


def _written(atom: str) -> str:
    points = list(_points(atom))
    written = list(_gaps([*_gaps(points), *_NOT_WRITTEN]))
    if written == list(_gaps(_gaps(points))):
        return atom
    # A range up to the last character is no help to the compiler: its masks allow then what it does not accept.
    is_open = bool(written) and written[-1][1] == _LAST_POINT
    listed = _gaps(written) if is_open else written
    ranges = (_literal(low) if low == high else f"{_literal(low)}-{_literal(high)}" for low, high in listed)
    return f"[{'^' * is_open}{''.join(ranges)}]"


def _points(atom: str) -> Iterator[Points]:
    """What it stands for. Anchors, groups and repetitions stand for themselves, which all can be written."""
    if atom == ".":
        yield from _gaps([(0x0A, 0x0A)])
    elif not _is_class(atom):
        yield from _points_of(atom)
    elif atom[1] == "^":
        yield from _gaps(_points_of(atom[2:-1]))
    else:
        yield from _points_of(atom[1:-1])


def _points_of(members: str) -> Iterator[Points]:
    """Of a class without its brackets, or of one character or escape."""
    found = _MEMBER.findall(members)
    while found:
        member = found.pop(0)
        if member[0] == "\\" and (named := _CLASSES.get(member[1:].lower())):
            yield from named if member[1].islower() else _gaps(named)
        elif found[:1] == ["-"] and len(found) > 1:
            low, high = sorted((_code(member), _code(found[1])))
            yield low, high
            del found[:2]
        else:
            yield _code(member), _code(member)


def _code(member: str) -> int:
    if member[0] != "\\" or len(member) == 1:
        return ord(member)
    kind, digits = member[1], member[2:]
    if not digits:
        return ord(_CONTROLS.get(kind, kind))
    return ord(digits) & 0x1F if kind == "c" else int(digits, 16)


def _gaps(points: Iterable[Points]) -> Iterator[Points]:
    """All that is not in ``points``."""
    start = 0
    for low, high in sorted(points):
        if low > start:
            yield start, low - 1
        start = max(start, high + 1)
    if start <= _LAST_POINT:
        yield start, _LAST_POINT


def _literal(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else chr(code)
