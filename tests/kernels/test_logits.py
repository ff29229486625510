"""What sampling rules change of logits on a device is what their formulas say, and nothing else.

On a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_logits.py``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")
from radixserve.kernels.triton_logits import TritonSampling  # noqa: E402

KERNELS = TritonSampling(pdl=False)


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
