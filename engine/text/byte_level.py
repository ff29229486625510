"""The alphabet of byte-level BPE: one printable character for each of the 256 bytes (GPT-2)."""

from __future__ import annotations


def _alphabet() -> list[str]:
    """Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHAR_OF_BYTE = _alphabet()
BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
