"""How a tokenizer spells text that stands between tokens which are fixed and text that is not known yet. No torch."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from os.path import commonprefix


class Speller:
    """Owns the order of a vocabulary. ``encode`` is the model's tokenizer without special tokens; ``vocabulary`` has
    what each token adds to the text, empty for those that are no text."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Sequence[bytes]) -> None:
        self._encode = encode
        self._vocabulary = vocabulary
        self._ordered = sorted(filter(vocabulary.__getitem__, range(len(vocabulary))), key=vocabulary.__getitem__)

    def spell(self, text: str) -> list[int]:
        """Tokens of ``text`` up to where they may depend on what follows it: before the first one from which on the
        rest of ``text`` is the beginning of a longer token (as in token healing)."""
        data = text.encode()
        token_ids = self._encode(text)
        # Some write a space before each text, or take part of it as control tokens.
        if b"".join(self._vocabulary[token_id] for token_id in token_ids if token_id < len(self._vocabulary)) != data:
            token_ids = self._longest_first(data)
        start = 0
        for count, token_id in enumerate(token_ids):
            if self._begins_longer(data[start:]):
                return token_ids[:count]
            start += len(self._vocabulary[token_id])
        return token_ids

    def _begins_longer(self, data: bytes) -> bool:
        """Whether a token begins with ``data`` and is longer."""
        place = bisect_right(self._ordered, data, key=self._vocabulary.__getitem__)
        return place < len(self._ordered) and self._vocabulary[self._ordered[place]].startswith(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """The longest token that ``data`` begins with, and so on; ends early where there is none."""
        token_ids: list[int] = []
        while (token_id := self._longest(data)) is not None:
            token_ids.append(token_id)
            data = data[len(self._vocabulary[token_id]) :]
        return token_ids

    def _longest(self, data: bytes) -> int | None:
        while data and (place := bisect_right(self._ordered, data, key=self._vocabulary.__getitem__)):
            # Tokens that ``data`` begins with come before it, and what is between them and it begins with them too.
            token_id = self._ordered[place - 1]
            token = self._vocabulary[token_id]
            if data.startswith(token):
                return token_id
            data = data[: len(commonprefix([token, data]))]
        return None
