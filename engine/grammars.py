"""Grammars by xgrammar, which only this module and ``compiling`` know.

xgrammar (Dong et al. 2024, arXiv 2411.15100) compiles a grammar together with the vocabulary: where most tokens may
stand is known beforehand, so that a mask takes microseconds. It is imported when the first grammar comes: that takes a
second, and many servers never get one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from radixserve.engine.compiling import TOO_SLOW, Compiler
from radixserve.engine.constraint import WORD_BITS, ConstraintFailed, TokenConstraint, mask_words
from radixserve.engine.errors import InvalidRequest, ModelError
from radixserve.engine.spelling import Speller
from radixserve.engine.step import Int32s
from radixserve.engine.text.tokenizer import Tokenizer
from radixserve.engine.trials import GrammarTrials, TrialSetup

CACHE_BYTES = 256 << 20
# Masks are made between two steps, where everybody waits for them: CPU time that those of a request may take together.
_MAX_MASKS_S = 1.0
_MAX_MASK_S = 0.01
# To find out whether what is forced has an end within reach, before the library looks for it: tokens, and CPU time.
_MAX_STEPS_AHEAD = 256
_MAX_AHEAD_S = 0.02


class XGrammars:
    """Owns what was compiled, up to ``CACHE_BYTES``; the least recently used goes first. ``load_tokenizer`` is called
    once, with the first grammar. Any thread may call it."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]):
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._num_bytes = 0
        self._cache_lock = threading.Lock()  # held for a moment only: the engine's loop takes it
        self._made: tuple[Compiler, GrammarTrials] | None = None
        self._tokens: _Tokens | None = None
        self._tools_lock = threading.Lock()

    def cached(self, grammar: str) -> TokenConstraint | None:
        with self._cache_lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                return None
            self._compiled.move_to_end(grammar)
        return self._matcher(compiled)

    def compile(self, grammar: str) -> TokenConstraint:
        if (constraint := self.cached(grammar)) is not None:
            return constraint
        compiler, trials = self._tools()
        trials.check(grammar)
        compiled = compiler.compile(grammar)
        with self._cache_lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._num_bytes += compiled.memory_size_bytes
            while len(self._compiled) > 1 and self._num_bytes > CACHE_BYTES:
                self._num_bytes -= self._compiled.popitem(last=False)[1].memory_size_bytes
        return self._matcher(compiled)

    def close(self) -> None:
        """End what runs beside this process."""
        if self._made is not None:
            self._made[1].close()

    def _matcher(self, compiled: Any) -> _Matcher:
        assert self._tokens is not None, "what is compiled was compiled with them"
        return _Matcher(compiled, self._tokens)

    def _tools(self) -> tuple[Compiler, GrammarTrials]:
        with self._tools_lock:
            if self._made is None:
                try:
                    tokenizer = self._load_tokenizer()
                except ModelError as error:
                    raise InvalidRequest(str(error), param="grammar") from error
                # An empty token is never allowed: control tokens are not text, even where a grammar allows any text.
                vocabulary = [
                    b"" if token_id in tokenizer.control_ids else tokenizer.token_bytes(token_id)
                    for token_id in range(self._vocab_size)
                ]
                trials = GrammarTrials(TrialSetup(vocabulary, self._eos_token_ids))
                self._tokens = _Tokens(tokenizer, vocabulary, self._eos_token_ids)
                self._made = Compiler(vocabulary, self._eos_token_ids, CACHE_BYTES // 4), trials
        return self._made


class _Tokens:
    """What masks and forced text mean in the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]):
        self._text_of = [b"" if token_id in eos_token_ids else text for token_id, text in enumerate(vocabulary)]
        self._speller = Speller(partial(tokenizer.encode, add_special_tokens=False), self._text_of)
        self.num_words = mask_words(len(vocabulary))
        # The bits of the last word of a mask that stand for tokens: 2^n - 1, as an int32.
        self.last_word = np.array((1 << (len(vocabulary) - 1) % WORD_BITS + 1) - 1, np.uint32).view(np.int32)
        self._begins = np.zeros(self.num_words * WORD_BITS, "S1")
        self._begins[: len(vocabulary)] = [text[:1] for text in self._text_of]
        self._others: dict[bytes, Int32s] = {}  # by first byte: a mask of the tokens that begin with another

    def spell(self, text: str) -> list[int]:
        return self._speller.spell(text)

    def one_way(self, words: Int32s) -> int | None:
        """A token that the mask ``words`` (not empty) allows; None if it allows texts that begin differently, or the
        end. Mostly the first and the last token tell, in microseconds."""
        is_set = words != 0
        first, last = int(is_set.argmax()), len(words) - 1 - int(is_set[::-1].argmax())
        low, high = int(words[first]), int(words[last]) & 0xFFFFFFFF
        lowest = first * WORD_BITS + (low & -low).bit_length() - 1
        highest = last * WORD_BITS + high.bit_length() - 1
        begin = self._text_of[lowest][:1]
        if not begin or begin != self._text_of[highest][:1] or (words & self._not_with(begin)).any():
            return None
        return highest

    def _not_with(self, begin: bytes) -> Int32s:
        if begin not in self._others:
            self._others[begin] = np.packbits(self._begins != begin, bitorder="little").view(np.int32)
        return self._others[begin]


class _Matcher:
    """The ``TokenConstraint`` of one request."""

    def __init__(self, compiled: Any, tokens: _Tokens):
        import xgrammar

        self._tokens = tokens
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask: Int32s | None = None  # of what comes next, if ``forced`` was asked for it
        self._looks_ahead = True
        self._num_masks = 0
        self._masks_s = 0.0

    def fill_mask(self, words: Int32s) -> None:
        if self._mask is None:
            self._fill(words)
        else:
            words[:] = self._mask

    def accept(self, token_id: int) -> bool:
        self._mask = None
        if not self._matcher.accept_token(token_id):
            raise ConstraintFailed(f"token {token_id} does not fit the grammar")
        return bool(self._matcher.is_terminated())

    def forced(self) -> list[int]:
        if not self._looks_ahead:
            return []
        words = np.empty(self._tokens.num_words, np.int32)
        self._fill(words)
        has_text = self._has_forced_text(words)
        self._mask = words
        return self._tokens.spell(self._matcher.find_jump_forward_string()) if has_text else []

    def _has_forced_text(self, words: Int32s) -> bool:
        """Whether there may be forced text, which surely has an end. The library follows it for as long as it goes on,
        and with ``root ::= "a" root`` that is for ever. So first go any way through the grammar to a place where texts
        may begin differently: if the forced text leads through that place, it ends there, and if not, before it."""
        token = self._tokens.one_way(words)
        if token is None:
            return False
        # A copy goes there, for the way back would not lead to the same budgets of tokens.
        ahead, words, deadline = self._matcher.fork(), words.copy(), time.thread_time() + _MAX_AHEAD_S
        for _ in range(_MAX_STEPS_AHEAD):
            if not ahead.accept_token(token) or time.thread_time() > deadline:
                break
            ahead.fill_next_token_bitmask(words.reshape(1, -1))
            words[-1] &= self._tokens.last_word
            if not words.any():
                break
            token = self._tokens.one_way(words)
            if token is None:
                return True
        self._looks_ahead = False  # it would take as long at the next token
        return False

    def _fill(self, words: Int32s) -> None:
        before = time.thread_time()
        self._matcher.fill_next_token_bitmask(words.reshape(1, -1))
        words[-1] &= self._tokens.last_word
        self._masks_s += time.thread_time() - before
        self._num_masks += 1
        if self._masks_s > _MAX_MASKS_S + self._num_masks * _MAX_MASK_S:
            raise ConstraintFailed(TOO_SLOW)
        if not words.any():
            raise ConstraintFailed("no token of the model fits the grammar here")
