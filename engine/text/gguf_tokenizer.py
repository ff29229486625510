"""Builds a tokenizer from the metadata of a GGUF file, which names a scheme instead of carrying a tokenizer.json.

Two families: "gpt2", byte-level BPE whose pre-tokenizer ``tokenizer.ggml.pre`` names, and "llama", SentencePiece BPE
given as scores. Regular expressions are those that the original models' tokenizers were trained with.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from radixserve.engine.errors import ModelError
from radixserve.engine.text.tokenizer import BYTE_OF_CHAR, CHAR_OF_BYTE

Metadata = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # Token types.

_LETTERS_AND_REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + "|" + _LETTERS_AND_REST % r"\p{N}{1,3}"
_QWEN2 = _CONTRACTIONS + "|" + _LETTERS_AND_REST % r"\p{N}"
_TEKKEN = _CASED_WORDS % ("", "") + r"|\p{N}" + _CASED_REST
_GPT4O = _CASED_WORDS % (2 * (_CONTRACTIONS + "?",)) + r"|\p{N}{1,3}" + _CASED_REST

# Names of tokenizer.ggml.pre by what they do. Those of _WITH_BOS add BOS unless the file says otherwise.
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
_DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2 = {"gpt-2", "default", "mpt", "olmo", "jais", "trillion"}
_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
# Their merges do not reach every token of the vocabulary: a word that is a token is taken whole.
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def build_gguf_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that ``metadata`` describes. Raises ``ModelError`` for a scheme that is not supported."""
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(metadata)
        case "llama":
            tokenizer = _sentencepiece(metadata)
        case kind:
            raise ModelError(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    _add_marked_tokens(tokenizer, metadata)
    _add_post_processor(tokenizer, metadata)
    return tokenizer


def gguf_special_tokens(metadata: Metadata) -> dict[str, str]:
    """``bos_token`` and the like -> its text, as chat templates want them."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    tokens = metadata["tokenizer.ggml.tokens"]
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _byte_level(metadata: Metadata) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(pre)
    merges = [merge.partition(" ")[::2] for merge in _required(metadata, "merges")]
    # User-defined tokens may be written as plain text; the model knows every token in the byte alphabet.
    vocab = {_in_byte_alphabet(token): i for i, token in enumerate(_required(metadata, "tokens"))}
    tokenizer = _bpe(vocab, merges, ignore_merges=pre in _IGNORE_MERGES)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # The library raises bare Exception.
        raise ModelError(f"the GGUF file's tokenizer is damaged: {error}") from error


def _in_byte_alphabet(token: str) -> str:
    if BYTE_OF_CHAR.keys() >= set(token):
        return token
    return "".join(CHAR_OF_BYTE[byte] for byte in token.encode("utf-8"))


def _pre_tokenizer(pre: str) -> PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _DIGITS_THEN_GPT2:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    supported = ", ".join(sorted(_GPT2 | _DIGITS_THEN_GPT2 | _SPLITS.keys()))
    raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {supported}")


def _sentencepiece(metadata: Metadata) -> Tokenizer:
    tokens = _required(metadata, "tokens")
    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if is_gemma:
        tokens = ["▁" * len(token) if token.isspace() and set(token) == {" "} else token for token in tokens]
        priorities = [-float(i) for i in range(len(tokens))]  # Gemma's scores do not follow the order of its merges.
    else:
        priorities = [float(score) for score in _required(metadata, "scores")]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = gguf_special_tokens(metadata).get("unk_token")
    merges = _merges(vocab, priorities)
    tokenizer = _bpe(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if adds_space else "never", split=False)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(chain + ([decoders.Strip(" ", 1, 0)] if adds_space else []))
    return tokenizer


def _merges(vocab: Mapping[str, int], priorities: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best token first: BPE by rank then does what SentencePiece does by
    score."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-priorities[i], -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def _add_marked_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Control tokens, and those with a role, are special; user-defined ones are matched whole but are plain text."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    roles = set(gguf_special_tokens(metadata).values())
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL or token in roles]
    special += sorted(roles - set(special))
    known = tokenizer.get_vocab(with_added_tokens=False)
    plain = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED and token in known]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special if t in known])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_post_processor(tokenizer: Tokenizer, metadata: Metadata) -> None:
    adds_bos = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _WITH_BOS
    roles = gguf_special_tokens(metadata)
    template, named = ["$A"], []
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in roles:
        template.insert(0, roles["bos_token"])
        named.append((roles["bos_token"], int(metadata["tokenizer.ggml.bos_token_id"])))
    if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in roles:
        template.append(roles["eos_token"])
        named.append((roles["eos_token"], int(metadata["tokenizer.ggml.eos_token_id"])))
    if named:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)


def _required(metadata: Metadata, key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None or len(value) == 0:
        raise ModelError(f"the GGUF file has no tokenizer.ggml.{key}; give another tokenizer with --tokenizer")
    return value
