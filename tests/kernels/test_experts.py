"""A mixture of experts on a device gives what plain torch gives, whatever the routing.

On a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_experts.py``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from radixserve.kernels.quantized import Form, QuantizedMatrix, Stack, quantize
from radixserve.kernels.torch_ops import TorchOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no bf16 products
SHARED_BYTES = 227 << 10
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


class Mixture:
    """Random weights; ``favourite``: the expert that all tokens like best."""

    def __init__(self, num_experts: int, hidden: int, inner: int, favourite: int | None = None):
        self.router, self.favourite = randn(num_experts, hidden) / hidden**0.5, favourite
        self.gate_up = randn(num_experts, 2 * inner, hidden) / hidden**0.5
        self.down = randn(num_experts, hidden, inner) / inner**0.5

    def scores(self, x: Tensor) -> Tensor:
        scores = x.float() @ self.router.float().t()
        if self.favourite is not None:
            scores[:, self.favourite] += 100
        return scores

    def quantized(self, form: Form) -> tuple[QuantizedMatrix, QuantizedMatrix]:
        """As stacks, with zero points that differ; from now on the weights are what these mean."""
        gate_up, down = (quantize(stack.flatten(0, 1), form) for stack in (self.gate_up, self.down))
        for matrix in (gate_up, down):
            if matrix.zeros is not None:
                matrix.zeros.copy_(torch.randint(6, 11, matrix.zeros.shape, device=DEVICE))
        self.gate_up = gate_up.dequantized(torch.float32).view_as(self.gate_up)
        self.down = down.dequantized(torch.float32).view_as(self.down)
        return gate_up, down

    def answer(
        self,
        x: Tensor,
        slots: Tensor,
        per_token: int,
        normalized: bool,
        stacks: tuple[Stack, Stack] | None = None,
        tiles: Any = None,
    ) -> Tensor:
        from radixserve.kernels.triton_experts import choose_tiles, experts, route

        gate_up, down = stacks or (self.gate_up, self.down)
        bits = gate_up.form.bits if isinstance(gate_up, QuantizedMatrix) else 16
        tiles = tiles or choose_tiles(len(x), per_token, len(self.router), SHARED_BYTES, bits)
        pdl = not INTERPRETED
        routing = route(self.scores(x), slots, per_token, normalized, tiles, pdl)
        return experts(x, gate_up, down, routing, tiles, pdl).float().sum(0)

    def expected(self, x: Tensor, per_token: int, normalized: bool) -> Tensor:
        """In fp32, one token and expert at a time."""
        weights, chosen = self.scores(x).softmax(-1).topk(per_token, dim=-1)
        if normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(x.shape, device=DEVICE)
        for token, rank in torch.cartesian_prod(torch.arange(len(x)), torch.arange(per_token)).tolist():
            expert = int(chosen[token, rank])
            gate, up = (self.gate_up[expert].float() @ x[token].float()).chunk(2)
            answer = self.down[expert].float() @ (torch.nn.functional.silu(gate) * up)
            out[token] += weights[token, rank] * answer
        return out


def error(out: Tensor, reference: Tensor) -> float:
    return float((out - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    ("num_experts", "hidden", "inner", "per_token"), [(6, 64, 24, 2), (24, 32, 96, 8), (8, 96, 64, 1)]
)
@pytest.mark.parametrize("tokens", [1, 16, 17, 75])
@pytest.mark.parametrize("normalized", [True, False])
def test_answers_are_those_of_one_token_and_expert_at_a_time(
    num_experts: int, hidden: int, inner: int, per_token: int, tokens: int, normalized: bool
) -> None:
    """With these sizes some experts get no tokens, and their share of rows is far from even."""
    mixture, x = Mixture(num_experts, hidden, inner), randn(tokens, hidden)
    slots = torch.arange(tokens, device=DEVICE)
    out = mixture.answer(x, slots, per_token, normalized)
    assert error(out, mixture.expected(x, per_token, normalized)) < (1e-5 if INTERPRETED else 1e-2)
    assert torch.equal(out, mixture.answer(x, slots, per_token, normalized))


@pytest.mark.parametrize("tokens", [16, 50])
def test_one_expert_may_get_all_tokens(tokens: int) -> None:
    mixture, x = Mixture(12, 64, 32, favourite=11), randn(tokens, 64)
    for per_token in (1, 2):
        out = mixture.answer(x, torch.arange(tokens, device=DEVICE), per_token, True)
        assert error(out, mixture.expected(x, per_token, True)) < (1e-5 if INTERPRETED else 1e-2)


@pytest.mark.parametrize("tokens", [4, 8, 40, 70])
def test_padding_goes_to_no_expert_and_changes_nothing(tokens: int) -> None:
    from radixserve.kernels.triton_experts import choose_tiles, route

    mixture, x = Mixture(6, 64, 32), randn(tokens, 64)
    slots = torch.arange(tokens, device=DEVICE)
    real = torch.rand(tokens, device=DEVICE) < 0.5
    real[0], real[-1] = True, False
    slots[~real] = -1
    x[~real] = float("nan")
    out = mixture.answer(x, slots, 2, True)
    assert error(out[real], mixture.expected(x[real], 2, True)) < (1e-5 if INTERPRETED else 1e-2)
    routing = route(mixture.scores(x), slots, 2, True, choose_tiles(tokens, 2, 6, SHARED_BYTES), not INTERPRETED)
    assert (routing.chosen[real] < 6).all() and (routing.chosen[~real] == 6).all()
    if routing.pairs is not None and routing.blocks is not None:
        assert int(routing.blocks[2].sum()) == 2 * int(real.sum())


@pytest.mark.parametrize("tokens", [3, 40])
def test_scores_that_are_no_numbers_spoil_only_their_own_token(tokens: int) -> None:
    mixture, x = Mixture(6, 64, 32), randn(tokens, 64)
    x[2] = float("nan")
    others = torch.arange(tokens, device=DEVICE) != 2
    out = mixture.answer(x, torch.arange(tokens, device=DEVICE), 2, True)
    assert out[2].isnan().all()
    assert error(out[others], mixture.expected(x[others], 2, True)) < (1e-5 if INTERPRETED else 1e-2)


FORMS = [Form(8, None), Form(8, 128), Form(8, 128, height=128), Form(8, 32), Form(4, 32), Form(4, 128)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
def test_quantized_experts_answer_what_their_weights_stand_for(form: Form, tokens: int) -> None:
    mixture, x = Mixture(6, 256, 128), randn(tokens, 256)
    stacks, slots = mixture.quantized(form), torch.arange(tokens, device=DEVICE)
    out = mixture.answer(x, slots, 2, True, stacks)
    tolerance = 1e-3 if form.bits == 4 else 1e-5  # activations are rounded to fp16 for 4 bits
    assert error(out, mixture.expected(x, 2, True)) < (tolerance if INTERPRETED else 1e-2)
    # In fp32, or a token with two experts that it likes nearly as much may go to the other one.
    by_torch = TorchOps().experts(x.float(), mixture.router.float(), *stacks, 2, True, slots)
    assert error(by_torch, mixture.expected(x, 2, True)) < 1e-4


@pytest.mark.parametrize("form", [Form(8, None), Form(8, 64)], ids=str)
def test_columns_of_quantized_experts_need_not_fill_a_tile(form: Form) -> None:
    mixture, x = Mixture(6, 192, 320), randn(20, 192)
    out = mixture.answer(x, torch.arange(20, device=DEVICE), 2, False, mixture.quantized(form))
    assert error(out, mixture.expected(x, 2, False)) < (1e-5 if INTERPRETED else 1e-2)


@pytest.mark.parametrize("form", FORMS[:4], ids=str)
def test_with_many_rows_an_expert_they_are_rounded_to_e4m3_too(form: Form) -> None:
    from radixserve.kernels.triton_experts import choose_tiles
    from radixserve.kernels.triton_rounding import round_tokens

    def rounded(rows: Tensor) -> Tensor:
        narrow, scales = round_tokens(rows, None, pdl=not INTERPRETED)
        return (narrow.float() * scales.T).to(DTYPE)

    mixture, x = Mixture(2, 256, 128, favourite=1), randn(75, 256)
    stacks, slots = mixture.quantized(form), torch.arange(75, device=DEVICE)
    tiles = choose_tiles(75, 1, 2, SHARED_BYTES, 8, has_scaled=True)
    assert tiles is not None and tiles.scaled
    gate, up = (rounded(x).float() @ mixture.gate_up[1].T).chunk(2, 1)
    inner = (torch.nn.functional.silu(gate) * up).to(DTYPE)
    expected = rounded(inner).float() @ mixture.down[1].T
    assert error(mixture.answer(x, slots, 1, True, stacks, tiles), expected) < 2e-2
    widened = mixture.answer(x, slots, 1, True, stacks)
    assert error(widened, mixture.expected(x, 1, True)) < (1e-5 if INTERPRETED else 1e-2)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no graphs")
@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_replays_of_a_graph_follow_what_tokens_choose(tokens: int) -> None:
    """Capturing also fails where anything waits for the device."""
    from radixserve.kernels.cuda_ops import CudaOps

    mixture, ops = Mixture(128, 256, 192), CudaOps(pdl=True)
    x, slots = randn(tokens, 256), torch.arange(tokens, device=DEVICE)

    def answer() -> Tensor:
        parts = ops.experts(x, mixture.router, mixture.gate_up, mixture.down, 8, True, slots)
        return parts.float().sum(0)

    answer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = answer()
    for _ in range(3):
        x.copy_(randn(tokens, 256))
        graph.replay()
        wide = (weight.float() for weight in (x, mixture.router, mixture.gate_up, mixture.down))
        assert error(out, TorchOps().experts(*wide, 8, True, slots)) < 2e-2
