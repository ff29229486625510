"""What sampling rules change of logits on a device is what their formulas say, and nothing else.

On a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_logits.py``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

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

    assert torch.equal(drawn_from_parts(logits, ranks, rows, floats, ints, known, ours), drawn)
    assert torch.equal(ours, last_tokens)


def drawn_from_parts(logits: Tensor, ranks: int, rows: Tensor, *rules: Tensor) -> Tensor:
    """What all ranks pick; ``rules``: floats, ints, num_known and the last tokens to be written."""
    floats, ints, known, last_tokens = rules
    parts, lines = [LogitPart(rank, ranks, logits.shape[1]) for rank in range(ranks)], 0
    for part in parts:
        own = torch.full((len(logits), part.width), 1e9, device=DEVICE)  # padding, which must not win
        own[:, : part.columns] = logits[:, part.first : part.first + part.columns]
        lines = lines + KERNELS.lines_of_part(own, rows, floats, ints, known, part)
    picked = [KERNELS.pick(lines, rows, floats, ints, known, last_tokens, part) for part in parts]
    assert all(torch.equal(each, picked[0]) for each in picked)
    return picked[0]


@pytest.mark.parametrize(("vocab", "ranks"), [(77, 2), (9001, 3), (20_000, 4)])
def test_ranks_draw_from_their_largest_logits_what_filters_leave(
    vocab: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some rows more logits than there is room for are near the floor, or at it."""
    if INTERPRETED:
        monkeypatch.setattr(triton_sampling, "_fast_log", interpreted_log)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(12, vocab, generator=generator).mul_(2)
    logits[3] = logits[3].mul(100).round().div(100)  # with ties
    logits[4, :: max(1, vocab // 600)] = 9.0 + torch.arange(len(logits[4, :: max(1, vocab // 600)])) * 1e-6
    logits[5, vocab - 1] = torch.nan
    logits[6, 0] = torch.inf
    logits[7] = -torch.inf
    logits[8, 1:] = -torch.inf
    logits[9, vocab // 2] = -torch.nan
    top_k = [20, 1, 40, 7, 30, 20, 20, 20, 20, 20, vocab, 40]
    top_p = [0.95, 1.0, 0.5, 1.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0]
    min_p = [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05]
    temperatures = torch.tensor([0.6, 1.0, 1.3, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 2.0])
    floats = torch.stack((temperatures, torch.tensor(top_p), torch.tensor(min_p)), 1).to(DEVICE)
    logits, rows = logits.to(DEVICE), torch.arange(12, device=DEVICE).int()
    last_tokens, ours = (torch.zeros(12, dtype=torch.int64, device=DEVICE) for _ in range(2))
    for known in range(2):
        ints = torch.stack((torch.arange(12) * 987_654_321 + known, torch.tensor(top_k)), 1).to(DEVICE)
        rules = (floats, ints, rows + known)
        drawn = KERNELS.draw(logits, rows, *rules, last_tokens)
        assert drawn[1].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0]
        assert torch.equal(drawn_from_parts(logits, ranks, rows, *rules, ours), drawn)
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
