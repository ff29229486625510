"""Varied strings for comparing tokenizers: hand-picked hard ones, and seeded random mixtures of alphabets."""

import random

HARD = [
    "", " ", "  ", "\n", "\n\n", "\t", "\r\n", " lead", "trail ", "a\n\nb", "  two  ", "CR\r\nLF", "tab\tx",
    "zero\u200bwidth", "e\u0301", "nul\u0000x", "🙂", "👩‍👩‍👧‍👦 family", "日本語テキスト", "한국어", "नमस्ते",
    "مرحبا بالعالم", "čřžýáíé",
    "It's they're I'll we've he'd I'm don't IT'S", "12345 3.14159 1,000,000 0x1F 1e-9",
    "List:\n\n1. one\n\n2. two\n  3. three",
    "def f(x):\n    return x  ** 2  # comment\n\n\nprint(f(3))\n", "<html><body class='a'>&amp;</body></html>",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';", "{\"key\": [1, 2, {\"a\": null}]}", "https://example.org/a?b=c&d=%20#e",
    "<|im_start|>user\nhi<|im_end|>", "<|im_end|><|im_end|>", "<|im_ end|>", "<|endoftext|> x",
    "<repo_name>a<file_sep>b",
    "²³ ½ ① Ⅳ ٣٤ १२", "\u2028line\u2029para", "\ufeffbom", "a" * 300, "=" * 90, " " * 100, "\n" * 50, "🙂" * 40,
]  # fmt: skip

_ALPHABETS = [
    "abcdefghij klmnop qrstuv wxyz ",
    "ABC def GHI. jkl, mno! pqr? ",
    "0123456789 .,-+ \n",
    " \t\n\r",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "áéíóúñüçßøåæœ ",
    "日本語中文字한국어かなカナ、。",
    "абвгд еёжз ",
    "🙂🎉🚀👍🏽❤️🇨🇿",
    "\u0301\u200b\u200d\ufe0f\u00a0\u3000",
]
_PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "the",
    " and",
    "'s",
    "\n\n",
    "  ",
    "```python\n",
    "def ",
    "\n1. ",
]


def random_texts(count: int, seed: int = 7) -> list[str]:
    chance = random.Random(seed)
    return [_random_text(chance) for _ in range(count)]


def _random_text(chance: random.Random) -> str:
    parts = []
    for _ in range(chance.randint(1, 8)):
        if chance.random() < 0.3:
            parts.append(chance.choice(_PIECES))
        else:
            parts.append("".join(chance.choices(chance.choice(_ALPHABETS), k=chance.randint(1, 12))))
    return "".join(parts)
