"""What may limit the tokens of one request: the border to whatever knows grammars. No torch."""

from typing import Protocol

import numpy as np

from radixserve.engine.errors import RadixServeError
from radixserve.engine.step import Int32s

WORD_BITS = 32


class ConstraintFailed(RadixServeError):
    """The request cannot go on; the others can."""


class TokenConstraint(Protocol):
    """Follows the output of one request and knows which tokens may come next."""

    def fill_mask(self, words: Int32s) -> None:
        """Set exactly the bits of the tokens that may come next, at least one: token i is bit ``i % 32`` of
        ``words[i // 32]``. Raises ``ConstraintFailed``."""

    def accept(self, token_id: int) -> bool:
        """Take the next token; true if it ends the output. Raises ``ConstraintFailed`` if it was not allowed."""

    def forced(self) -> list[int]:
        """Tokens that spell what must come next, as far as it is certain how; often none. Takes none of them. Raises
        ``ConstraintFailed``."""


class ConstraintSource(Protocol):
    """Makes constraints from ``SamplingParams.grammar``."""

    def cached(self, grammar: str) -> TokenConstraint | None:
        """A new constraint, if it takes no time to make."""

    def compile(self, grammar: str) -> TokenConstraint:
        """May take seconds; any thread may call it. Raises ``InvalidRequest`` with what is wrong."""


def mask_words(vocab_size: int) -> int:
    """int32s that hold one bit for each token."""
    return -(-vocab_size // WORD_BITS)


def forbid(words: Int32s, token_ids: frozenset[int]) -> None:
    """Take ``token_ids`` out of a mask, unless nothing would be left of it."""
    without = words.view(np.uint32).copy()
    for token_id in token_ids:
        without[token_id // WORD_BITS] &= np.uint32(~(1 << token_id % WORD_BITS) & 0xFFFFFFFF)
    if without.any():
        words.view(np.uint32)[:] = without
