"""What sampling rules change of logits on a device is what their formulas say, and nothing else.

On a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_logits.py``.
"""

from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from radixserve.kernels import triton_sampling  # noqa: E402
from radixserve.kernels.interface import LogitPart  # noqa: E402
from radixserve.kernels.triton_logits import TritonSampling  # noqa: E402

KERNELS = TritonSampling(pdl=False)


@triton.jit
def interpreted_log(x):
    return tl.log(x)


@pytest.mark.parametrize(("vocab", "ranks"), [(77, 2), (9001, 2), (9001, 3), (5, 4), (30_000, 2)])
def test_ranks_draw_from_parts_of_the_logits_what_one_draws_from_all(
    vocab: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:  # which knows no assembly
        monkeypatch.setattr(triton_sampling, "_fast_log", interpreted_log)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator).mul_(8).round_().div_(2).to(DEVICE)  # with ties
    logits[0, [vocab // 2, vocab - 1]] = 30.0
    logits[1:3, vocab - 1] = torch.tensor([torch.nan, torch.inf], device=DEVICE)
    logits[3:5] = -torch.inf
    logits[4, vocab - 1] = -3.0
    temperatures = torch.tensor([0, 0.8, 0, 0.5, 0, 0, 0.3, 1.0, 2.5])
    floats = torch.stack((temperatures, torch.ones(9), torch.zeros(9)), 1).to(DEVICE)
    ints = torch.stack((torch.arange(9) * 12_345_678_901, torch.full((9,), vocab)), 1).to(DEVICE)
    rows, known = torch.arange(9, device=DEVICE).int().flip(0), torch.arange(9, device=DEVICE).int()
    floats, ints = floats.flip(0), ints.flip(0)
    last_tokens, ours = (torch.zeros(9, dtype=torch.int64, device=DEVICE) for _ in range(2))
    drawn = KERNELS.draw(logits, rows, floats, ints, known, last_tokens)
    assert drawn[0, 0] == vocab // 2 and drawn[0, 4] == vocab - 1
    assert drawn[1].tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0]

    width = -(-vocab // ranks)
    starts = [min(rank * width, vocab) for rank in range(ranks + 1)]
    bests = []
    for rank, (start, end) in enumerate(pairwise(starts)):
        part = torch.full((9, width), 1e9, device=DEVICE)  # padding, which must not win
        part[:, : end - start] = logits[:, start:end]
        columns = LogitPart(rank, ranks, start, end - start)
        bests.append(KERNELS.best_of_part(part, rows, floats, ints, known, columns))
    assert torch.equal(KERNELS.pick(sum(bests), rows, ours), drawn)
    assert torch.equal(ours, last_tokens)


@pytest.mark.parametrize("vocab", [77, 4096, 9001])
def test_tokens_without_a_bit_are_forbidden_in_the_rows_that_have_masks(vocab: int) -> None:
    rng = np.random.default_rng(1)
    allowed, masked = rng.random((2, vocab)) < 0.3, [4, 1]
    allowed[:, [0, 31, 32, vocab - 1]] = [[True, False, True, False], [False, True, False, True]]
    logits = torch.randn(6, vocab, device=DEVICE)
    logits[1, :40] = torch.nan
    expected = logits.clone()
    for line, row in zip(allowed, masked, strict=True):
        expected[row, torch.from_numpy(~line).to(DEVICE)] = -torch.inf
    bits = np.zeros((2, -(-vocab // 32) * 32), np.uint8)
    bits[:, :vocab] = allowed
    bits[1, vocab:] = 1  # no token's
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    lines = np.column_stack((words, np.array(masked, np.int32)))
    KERNELS.forbid(logits, torch.from_numpy(lines).to(DEVICE))
    assert torch.equal(logits.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("vocab", [77, 9001])
def test_penalties_follow_their_formulas_and_count_what_is_drawn(vocab: int) -> None:
    max_rows, rows = 8, torch.tensor([5, 0, 7, 2], device=DEVICE, dtype=torch.int32)
    logits = torch.randn(4, vocab, device=DEVICE) * 3
    floats = torch.ones(max_rows, 6, device=DEVICE)
    floats[:, 4:] = 0
    floats[5, 3], floats[0, 4], floats[2, 3:] = 1.7, 0.5, torch.tensor([0.6, -0.3, 1.25])  # row 7 has none
    produced = torch.randint(0, 3, (max_rows, vocab), device=DEVICE, dtype=torch.int32)
    in_prompt = torch.rand(max_rows, vocab, device=DEVICE) < 0.2
    before, some = produced.clone(), produced[rows.long()]
    repetition, frequency, presence = floats[rows.long(), 3:].chunk(3, dim=1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    expected = torch.where((some > 0) | in_prompt[rows.long()], repeated, logits)
    expected = expected - some * frequency - (some > 0) * presence
    free = logits[2].clone()
    KERNELS.penalize(logits, rows, floats, produced, in_prompt)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(logits[2], free) and torch.equal(produced, before)
    drawn = torch.tensor([3, vocab - 1, 0, 3], device=DEVICE, dtype=torch.int32)
    KERNELS.count(rows, drawn, produced)
    before[rows.long(), drawn.long()] += 1
    assert torch.equal(produced, before)
