"""Grammars by xgrammar, the only module that knows it.

xgrammar (Dong et al. 2024, arXiv 2411.15100) compiles a grammar together with the vocabulary: where most tokens may
stand is known beforehand, so that a mask takes microseconds. It is imported when the first grammar comes: that takes a
second, and many servers never get one.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from radixserve.engine.constraint import WORD_BITS, ConstraintFailed, TokenConstraint, mask_words
from radixserve.engine.errors import InvalidRequest, ModelError
from radixserve.engine.step import Int32s
from radixserve.engine.text.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20
# Masks are made between two steps, where everybody waits for them. Of CPU time: the first mask of a grammar, and what
# all masks of a request may take together.
_MAX_FIRST_MASK_S = 0.02
_MAX_MASKS_S = 1.0
_MAX_MASK_S = 0.01
# "[12:00:00] /path/file.cc:94: " stands before what the library has to say.
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")
# As xgrammar serializes them, a class with its size, that it is negated, and its ranges: all but quote, backslash and
# line breaks; all but quote, backslash, control characters and halves of surrogate pairs.
_LOOSE_CLASS = ",1,9,1,34,34,92,92,13,13,10,10,"
_JSON_CLASS = ",1,9,1,34,34,92,92,0,31,55296,57343,"

_TOO_SLOW = "the grammar takes too long at each token: use fewer alternatives, and shorter counted repetitions"


class XGrammars:
    """Owns what was compiled, up to ``CACHE_BYTES``; the least recently used goes first. ``load_tokenizer`` is called
    once, with the first grammar. Any thread may call it."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]):
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        # The bits of the last word of a mask that stand for tokens: 2^n - 1, as an int32.
        self._last_word = np.array((1 << (vocab_size - 1) % WORD_BITS + 1) - 1, np.uint32).view(np.int32)
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._num_bytes = 0
        self._cache_lock = threading.Lock()  # held for a moment only: the engine's loop takes it
        self._compiler: Any = None
        self._compiler_lock = threading.Lock()

    def cached(self, grammar: str) -> TokenConstraint | None:
        with self._cache_lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                return None
            self._compiled.move_to_end(grammar)
        return _Matcher(compiled, self._last_word)

    def compile(self, grammar: str) -> TokenConstraint:
        try:
            compiled = _compiled(self._the_compiler(), grammar)
        except (RuntimeError, ValueError) as error:
            reason = _PLACE.sub("", str(error)).strip()
            raise InvalidRequest(f"cannot be compiled: {reason}", param="grammar", code="invalid_grammar") from error
        self._check_speed(compiled)
        with self._cache_lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._num_bytes += compiled.memory_size_bytes
            while len(self._compiled) > 1 and self._num_bytes > CACHE_BYTES:
                self._num_bytes -= self._compiled.popitem(last=False)[1].memory_size_bytes
        return _Matcher(compiled, self._last_word)

    def _check_speed(self, compiled: Any) -> None:
        matcher, words = _Matcher(compiled, self._last_word), np.empty(mask_words(self._vocab_size), np.int32)
        try:
            matcher.fill_mask(words)  # what is made on first use
        except ConstraintFailed as error:
            raise InvalidRequest(f"cannot be kept: {error}", param="grammar", code="invalid_grammar") from error
        before = time.thread_time()
        matcher.fill_mask(words)
        if time.thread_time() - before > _MAX_FIRST_MASK_S:
            raise InvalidRequest(_TOO_SLOW, param="grammar", code="grammar_too_complex")

    def _the_compiler(self) -> Any:
        import xgrammar

        with self._compiler_lock:
            if self._compiler is None:
                try:
                    tokenizer = self._load_tokenizer()
                except ModelError as error:
                    raise InvalidRequest(str(error), param="grammar") from error
                # An empty token is never allowed: control tokens are not text, even where a grammar allows any text.
                vocabulary = [
                    b"" if token_id in tokenizer.control_ids else tokenizer.token_bytes(token_id)
                    for token_id in range(self._vocab_size)
                ]
                info = xgrammar.TokenizerInfo(
                    vocabulary,
                    xgrammar.VocabType.RAW,
                    vocab_size=self._vocab_size,
                    stop_token_ids=self._eos_token_ids,
                )
                # Its own cache keeps the parts that grammars share.
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES // 4)
        return self._compiler


def _compiled(compiler: Any, grammar: str) -> Any:
    """Strings with a length have characters of a class that lets raw control characters through, which JSON does not
    have (https://github.com/mlc-ai/xgrammar/issues/800): it is replaced in the grammar before the compilation."""
    if 'Length":' not in grammar:
        return compiler.compile_structural_tag(grammar)
    import xgrammar

    text = xgrammar.Grammar.from_structural_tag(grammar).serialize_json()
    return compiler.compile_grammar(xgrammar.Grammar.deserialize_json(text.replace(_LOOSE_CLASS, _JSON_CLASS)))


class _Matcher:
    """The ``TokenConstraint`` of one request."""

    def __init__(self, compiled: Any, last_word: Int32s):
        import xgrammar

        self._last_word = last_word
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._num_masks = 0
        self._masks_s = 0.0

    def fill_mask(self, words: Int32s) -> None:
        before = time.thread_time()
        self._matcher.fill_next_token_bitmask(words.reshape(1, -1))
        words[-1] &= self._last_word
        self._masks_s += time.thread_time() - before
        self._num_masks += 1
        if self._masks_s > _MAX_MASKS_S + self._num_masks * _MAX_MASK_S:
            raise ConstraintFailed(_TOO_SLOW)
        if not words.any():
            raise ConstraintFailed("no token of the model fits the grammar here")

    def accept(self, token_id: int) -> bool:
        if not self._matcher.accept_token(token_id):
            raise ConstraintFailed(f"token {token_id} does not fit the grammar")
        return bool(self._matcher.is_terminated())
