"""Text to token ids and back, on the ``tokenizers`` library alone. No torch, no transformers."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from radixserve.engine.errors import ModelError
from radixserve.engine.model_files import read_json
from radixserve.engine.text.detokenizer import DecodeStreamDetokenizer, Detokenizer, IncrementalDetokenizer


def _alphabet() -> list[str]:
    """Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHAR_OF_BYTE = _alphabet()
BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}


# Normalizers (NFC, NFKC) make text shorter, but by less than this factor.
_LARGEST_SHRINKAGE = 4


class Tokenizer:
    """Owns the tokenizer of one model. Calls do not change it: any thread may make them, and ``encode`` releases the
    interpreter lock while it works.

    ``special_tokens``: ``bos_token`` and the like -> text, for chat templates.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str]):
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        self.control_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_texts = tuple(token.content for token in added.values() if token.special)
        vocab = backend.get_vocab()
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        shrinkage = _LARGEST_SHRINKAGE if backend.normalizer else 1
        self._most_chars_per_token = max(map(len, vocab), default=1) * shrinkage
        config = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        self._to_bytes, self._leading_spaces = _byte_decoding(config)
        self._bytes_of: dict[int, bytes] = {}
        self._pieces: dict[frozenset[int], dict[int, str]] = {}  # by the ids that are skipped

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; text of control tokens becomes control tokens. ``add_special_tokens``: BOS or EOS are added where
        the model's tokenizer adds them by itself."""
        # The batch call releases the interpreter lock, the single one does not.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``ids``; equal to what an incremental detokenizer gives in pieces. Unknown ids give nothing."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.feed, ids)) + detokenizer.finish()

    def detokenizer(self, *, skip_special_tokens: bool, shown: Collection[str] = ()) -> Detokenizer:
        """A new incremental detokenizer for one stream. ``shown``: control tokens that are not skipped."""
        if self._to_bytes is None:
            return DecodeStreamDetokenizer(self.backend, skip_special_tokens)
        skipped = self.control_ids if skip_special_tokens else frozenset[int]()
        if shown and skipped:
            skipped -= {token_id for text in shown if (token_id := self.token_id(text)) is not None}
        return IncrementalDetokenizer(
            self.token_bytes, skipped, self._pieces.setdefault(skipped, {}), self._leading_spaces
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the UTF-8 output; incomplete characters occur. Empty for an unknown id."""
        found = self._bytes_of.get(token_id)
        if found is None:
            token = self.backend.id_to_token(token_id)
            convert = self._to_bytes or str.encode
            found = self._bytes_of[token_id] = convert(token) if token is not None else b""
        return found

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for an unknown id."""
        return self.backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        return self.backend.token_to_id(token)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text``, found without encoding it: far too long prompts can be
        refused before minutes of work go into them. Nothing is known (0) where a word of any length can be one
        unknown token."""
        return len(text) // self._most_chars_per_token if self._to_bytes else 0


def load_tokenizer(path: Path) -> Backend:
    """Read a ``tokenizer.json``. Raises ``ModelError``."""
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # The library raises bare Exception.
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_special_tokens(config_file: Path | None) -> dict[str, str]:
    """``bos_token`` and the like of a ``tokenizer_config.json``: written as text, or as an object with ``content``."""
    config = read_json(config_file) if config_file else {}
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


ToBytes = Callable[[str], bytes]


def _byte_decoding(decoder: Mapping[str, Any]) -> tuple[ToBytes | None, int]:
    """How a decoder turns a token into bytes, and how many leading spaces it strips from the text; None where tokens
    are not decoded one by one."""
    steps = decoder.get("decoders", [decoder])
    match [step.get("type") for step in steps]:
        case ["ByteLevel"]:
            return _byte_level_bytes, 0
        case ["Replace", "ByteFallback", "Fuse", *rest] if rest in ([], ["Strip"]):
            if steps[0].get("pattern") == {"String": "▁"} and steps[0].get("content") == " ":
                return _sentencepiece_bytes, steps[3]["start"] if rest else 0
    return None, 0


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # An added token that is written as plain text.
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode("utf-8")
