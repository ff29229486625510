"""Forced text in the model's own tokens, but for an end that what follows could change."""

import pytest

from radixserve.engine.spelling import Speller

# Token 0 is a control token, 1..26 are letters, then come longer ones.
VOCABULARY = [b"", *(bytes([ord("a") + n]) for n in range(26)), b"cat", b"cats", b" ", b" c", b"th", b"the", b"\xc3"]


def ids(*tokens: bytes) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


def speller(**encodings: list[int]) -> Speller:
    return Speller(lambda text: encodings[text.replace(" ", "_")], VOCABULARY)


@pytest.mark.parametrize(
    ("text", "encoded", "expected"),
    [
        ("dog", (b"d", b"o", b"g"), (b"d", b"o", b"g")),
        ("a_cat", (b"a", b" c", b"a", b"t"), (b"a", b" c", b"a")),  # "t" could be "the"
        ("cat", (b"c", b"a", b"t"), ()),  # "cat" could be "cats"
        ("cats", (b"cats",), (b"cats",)),
        ("dogth", (b"d", b"o", b"g", b"th"), (b"d", b"o", b"g")),
    ],
)
def test_the_end_stays_open_where_a_longer_token_may_come(
    text: str, encoded: tuple[bytes, ...], expected: tuple[bytes, ...]
) -> None:
    assert speller(**{text: ids(*encoded)}).spell(text.replace("_", " ")) == ids(*expected)


@pytest.mark.parametrize(
    "encoded",
    [
        ids(b" ", b"d", b"o", b"g"),  # by a tokenizer that writes a space before each text
        ids(b""),  # a control token
        [900],  # one that the model does not know
    ],
)
def test_what_the_tokenizer_does_not_write_as_it_stands_is_spelled_by_the_longest_tokens(encoded: list[int]) -> None:
    assert speller(catsdog=encoded).spell("catsdog") == ids(b"cats", b"d", b"o", b"g")


def test_spelling_ends_where_no_token_fits() -> None:
    assert speller(dog1dog=ids(b"d")).spell("dog1dog") == ids(b"d", b"o", b"g")
    assert speller(é=ids(b"d")).spell("é") == ids(b"\xc3"), "half a character is as good"
