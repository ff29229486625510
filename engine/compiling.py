"""xgrammar's compiler: from a structural tag to masks over one vocabulary. Used by the engine, and by the process in
which grammars are tried first."""

import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from radixserve.engine.constraint import mask_words
from radixserve.engine.errors import InvalidRequest

# Masks are made between two steps, where everybody waits for them: CPU time of one place of a trial.
_MAX_TRIAL_S = 0.05
_TRIAL_TOKENS = 24
# "[12:00:00] /path/file.cc:94: " stands before what the library has to say, and sometimes C++ behind that:
# "Check failed: (std::holds_alternative<Grammar>(result)) is false: ".
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: (Check failed: \(.*?\) is false: )?")
# As xgrammar serializes them, a class with its size, that it is negated, and its ranges: all but quote, backslash and
# line breaks; all but quote, backslash, control characters and halves of surrogate pairs.
_LOOSE_CLASS = ",1,9,1,34,34,92,92,13,13,10,10,"
_JSON_CLASS = ",1,9,1,34,34,92,92,0,31,55296,57343,"

TOO_COMPLEX = "grammar_too_complex"  # the code of an error
TOO_SLOW = "the grammar takes too long at each token: use fewer alternatives, and shorter counted repetitions"


class Compiler:
    """Compiles for one vocabulary: what each token adds to the text, empty for those that are no text. Any thread may
    call it. ``cache_bytes``: for parts that grammars share."""

    def __init__(self, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int], cache_bytes: int):
        import xgrammar

        self._vocab_size = len(vocabulary)
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary), xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=list(eos_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_limit_bytes=cache_bytes)

    def compile(self, grammar: str) -> Any:
        """A ``CompiledGrammar``. Raises ``InvalidRequest`` for a grammar with an error or with slow masks."""
        compiled = _compiled(self._compiler, grammar)
        self._check_speed(compiled)
        return compiled

    def outline(self, grammar: str) -> None:
        """The compilation but for its masks, which are most of the work. Raises ``InvalidRequest``."""
        import xgrammar

        _compiled(
            xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True),
            grammar,
        )

    def _check_speed(self, compiled: Any) -> None:
        """Raises ``InvalidRequest`` if masks take too long at the beginning, or on some way on from there."""
        import xgrammar

        matcher, words = xgrammar.GrammarMatcher(compiled), np.empty((1, mask_words(self._vocab_size)), np.int32)
        matcher.fill_next_token_bitmask(words)  # what is made on first use
        for _ in range(_TRIAL_TOKENS):
            before = time.thread_time()
            matcher.fill_next_token_bitmask(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), count=self._vocab_size, bitorder="little"))
            # The middle one is mostly a word, where there may be words, and seldom the end.
            if not len(allowed) or not matcher.accept_token(int(allowed[len(allowed) // 2])):
                reason = "cannot be kept: no token of the model fits the grammar at some place"
                raise InvalidRequest(reason, param="grammar", code="invalid_grammar")
            if time.thread_time() - before > _MAX_TRIAL_S:
                raise InvalidRequest(TOO_SLOW, param="grammar", code=TOO_COMPLEX)
            if matcher.is_terminated():
                return


def _compiled(compiler: Any, grammar: str) -> Any:
    try:
        return _in_json_characters(compiler, grammar)
    except (RuntimeError, ValueError) as error:
        reason = _PLACE.sub("", str(error)).strip()
        if reason == "std::bad_alloc":
            raise MemoryError from error
        raise InvalidRequest(f"cannot be compiled: {reason}", param="grammar", code="invalid_grammar") from error


def _in_json_characters(compiler: Any, grammar: str) -> Any:
    """Strings with a length have characters of a class that lets raw control characters through, which JSON does not
    have (https://github.com/mlc-ai/xgrammar/issues/800): it is replaced in the grammar before the compilation."""
    if 'Length":' not in grammar:
        return compiler.compile_structural_tag(grammar)
    import xgrammar

    text = xgrammar.Grammar.from_structural_tag(grammar).serialize_json()
    return compiler.compile_grammar(xgrammar.Grammar.deserialize_json(text.replace(_LOOSE_CLASS, _JSON_CLASS)))
