"""The torch operations against formulas written out plainly."""

import pytest
import torch

from radixserve.kernels import torch_ops
from radixserve.kernels.interface import HeadPlaces, Norm
from radixserve.kernels.invariant import InvariantOps
from radixserve.kernels.torch_ops import TorchOps

OPS = TorchOps()
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def test_norm_with_residual_adds_first() -> None:
    x, residual, weight = randn(5, 32), randn(5, 32) + 1, randn(32)
    stream = x + residual
    out, new_residual = OPS.add_rms_norm(x.clone(), residual.clone(), Norm(weight, EPS))
    torch.testing.assert_close(new_residual, stream)
    torch.testing.assert_close(out, normed(stream, weight))
    torch.testing.assert_close(OPS.rms_norm(x, Norm(weight, EPS)), normed(x, weight))


@pytest.mark.parametrize("kind", [TorchOps, InvariantOps])
def test_the_pulse_beats_between_products_and_within_large_ones(
    kind: type[TorchOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[int] = []
    ops = kind(lambda: beats.append(1))
    x, weight, bias = randn(100, 32), randn(64, 32), randn(64)
    expected = x @ weight.T + bias
    torch.testing.assert_close(ops.linear(x, weight, bias), expected)
    assert beats
    beats.clear()
    monkeypatch.setattr(torch_ops, "_MULTIPLICATIONS", 25 * 64 * 32)
    torch.testing.assert_close(ops.linear(x, weight, bias), expected)
    assert len(beats) >= 4


def test_gate_is_the_first_half() -> None:
    gate_up = randn(3, 8)
    gate, up = gate_up[:, :4], gate_up[:, 4:]
    torch.testing.assert_close(OPS.silu_mul(gate_up), gate * gate.sigmoid() * up)
    tanh = (torch.tensor(2 / torch.pi).sqrt() * (gate + 0.044715 * gate**3)).tanh()
    torch.testing.assert_close(OPS.gelu_mul(gate_up), gate * (1 + tanh) / 2 * up)


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rope_rotates_pairs_and_stores_by_slot_but_not_padding(rotary_dim: int, with_norms: bool) -> None:
    q_heads, kv_heads, dim = 4, 2, 8
    qkv = randn(3, (q_heads + 2 * kv_heads) * dim)
    positions = torch.tensor([5, 0, 9], dtype=torch.int32)
    slots = torch.tensor([-1, 6, 1])
    angles = randn(16, rotary_dim // 2)
    norms = [randn(dim), randn(dim) + 2] if with_norms else [None, None]
    k_cache, v_cache = (torch.full((2, 4, kv_heads, dim), 7.0) for _ in range(2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    head_norms = [Norm(weight, EPS) for weight in norms if weight is not None]
    q = OPS.rope_store(qkv, HeadPlaces(positions, cos_sin, slots, k_cache, v_cache, *head_norms))

    def rotated(head: torch.Tensor, position: int, norm: torch.Tensor | None) -> torch.Tensor:
        head = head if norm is None else normed(head, norm)
        pairs = torch.complex(head[: rotary_dim // 2], head[rotary_dim // 2 : rotary_dim])
        turned = pairs * torch.polar(torch.ones(rotary_dim // 2), angles[position])
        return torch.cat((turned.real, turned.imag, head[rotary_dim:]))

    heads = qkv.view(3, -1, dim)
    expected_k, expected_v = (torch.full((8, kv_heads, dim), 7.0) for _ in range(2))
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        for head in range(q_heads):
            torch.testing.assert_close(q[token, head], rotated(heads[token, head], position, norms[0]))
        for head in range(kv_heads if slot >= 0 else 0):
            expected_k[slot, head] = rotated(heads[token, q_heads + head], position, norms[1])
            expected_v[slot, head] = heads[token, q_heads + kv_heads + head]
    torch.testing.assert_close(k_cache.view_as(expected_k), expected_k)
    torch.testing.assert_close(v_cache.view_as(expected_v), expected_v)


def test_bf16_logits_do_not_tie_where_fp32_ones_differ() -> None:
    """The best two logits, 32 and 32.016, lie within one bf16 rounding step."""
    hidden = torch.full((1, 64), 0.5, dtype=torch.bfloat16)
    weight = torch.full((300, 64), 0.1, dtype=torch.bfloat16)
    weight[100] = weight[250] = 1.0
    weight[250, 0] = 1.0 + 2**-5
    logits = OPS.logits(hidden, weight)
    assert logits[0, 100] == 32.0 and logits[0, 250] == 32.0 + 2**-6
    assert int(logits.argmax()) == 250
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T, atol=0.02, rtol=0)
