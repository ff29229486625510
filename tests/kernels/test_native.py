"""The native CPU kernels against torch: every kind of weights, few tokens and many, in several instruction sets."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.engine.gguf_weights import pack_gguf
from radixserve.kernels import native_library
from radixserve.kernels.interface import HeadPlaces, Norm
from radixserve.kernels.native_library import NativeLibrary, NativeUnavailable
from radixserve.kernels.native_ops import NativeOps
from radixserve.kernels.packing import WeightKind, as_packed, large_page_room, pack, packed_bytes
from radixserve.kernels.select import BackendUnavailable, select_native
from radixserve.kernels.torch_ops import TorchOps

Kind = gguf.GGMLQuantizationType
EPS = 1e-5
# The best of this machine, and one with which most of the code takes another way; the others only when there is time.
LEVELS = (native_library.best_level(native_library.cpu_flags()), native_library.X86_LEVELS[-1])
OTHERS = [level for level in (*native_library.X86_LEVELS, native_library.PLAIN) if level not in LEVELS]


@pytest.fixture(
    scope="module",
    params=[*LEVELS, *(pytest.param(level, marks=pytest.mark.soak) for level in OTHERS)],
    ids=lambda level: level.name,
)
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeOps]:
    level = request.param
    if not native_library.cpu_flags().issuperset(level.cpu_flags):
        pytest.skip(f"this processor has no {level.name}")
    try:
        path = native_library.compile_native(level, tmp_path_factory.mktemp("native") / "native.so")
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    yield NativeOps(NativeLibrary(path, level.name, num_threads=2))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def packed(kind: WeightKind, values: Tensor) -> Tensor:
    return pack(kind, values)


def unpacked(ops: NativeOps, weight: Tensor, cols: int) -> Tensor:
    return ops.embed(torch.arange(len(weight)), weight, cols)


def assert_near(ours: Tensor, expected: Tensor, share: float) -> None:
    """Within ``share`` of what the values typically are."""
    assert float((ours - expected).abs().max()) < share * float(expected.std())


@pytest.mark.parametrize(("kind", "share"), [(WeightKind.Q4, 0.25), (WeightKind.Q8, 0.02), (WeightKind.BF16, 0.01)])
def test_packing_rounds_to_the_kind(ops: NativeOps, kind: WeightKind, share: float) -> None:
    values = randn(48, 96)
    values[5] = 0
    assert_near(unpacked(ops, packed(kind, values), 96), values, share)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_gguf_blocks_lose_nothing(ops: NativeOps, kind: Kind) -> None:
    raw = gguf.quantize(randn(32, 128).numpy(), kind)
    weight = torch.from_numpy(pack_gguf(raw, kind))
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    torch.testing.assert_close(unpacked(ops, weight, 128), expected, atol=1e-6, rtol=1e-6)


def test_gguf_k_blocks_lose_next_to_nothing(ops: NativeOps) -> None:
    raw = np.random.default_rng(0).integers(0, 60, (32, 2 * 144), np.uint8)
    expected = torch.from_numpy(gguf.dequantize(raw, Kind.Q4_K))
    weight = torch.from_numpy(pack_gguf(raw, Kind.Q4_K))
    assert_near(unpacked(ops, weight, 512), expected, 0.01)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 20, 41])
@pytest.mark.parametrize("kind", list(WeightKind))
def test_products_with_norm_bias_gate_and_residual(ops: NativeOps, kind: WeightKind, num_tokens: int) -> None:
    """Many tokens are rounded to bf16."""
    stream, norm, bias = randn(num_tokens, 96), Norm(randn(96) + 1, EPS), randn(48)
    wide, back = packed(kind, randn(48, 96)), packed(kind, randn(96, 64))
    gates, inner = packed(kind, randn(128, 96) / 10), randn(num_tokens, 64)
    floats = [unpacked(ops, weight, cols) for weight, cols in ((wide, 96), (gates, 96), (back, 64))]
    torch_ops = TorchOps()

    _, product = ops.project(stream, None, norm, wide, bias, gated=False)
    assert_near(product, torch_ops.project(stream, None, norm, floats[0], bias, gated=False)[1], 0.06)
    _, gated = ops.project(stream, None, norm, gates, None, gated=True)
    assert_near(gated, torch_ops.project(stream, None, norm, floats[1], None, gated=True)[1], 0.25)
    added, pending = ops.add_linear(stream.clone(), inner, back, randn(96))
    assert pending is None
    assert_near(added, stream + inner @ floats[2].T + randn(96), 0.06)


def test_buffers_of_recorded_steps_begin_with_a_cache_line(ops: NativeOps) -> None:
    with ops.recording(capacity=7) as program:
        buffers = [program.empty(width) for width in (32, 96, 32, 576)]
    assert [buffer.data_ptr() % 64 for buffer in buffers] == [0] * 4


def test_the_pulse_beats_while_products_are_computed() -> None:
    beats: list[int] = []
    try:
        ops = select_native(2, print, lambda: beats.append(threading.get_ident()))
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    x, weight = randn(64, 512), packed(WeightKind.Q8, randn(512, 512))
    deadline = time.monotonic() + 10
    while not beats and time.monotonic() < deadline:
        ops.linear(x, weight)
    assert beats == [threading.get_ident()], "by the thread that waits, and not at once again"


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_norms_around_layers_and_gates(ops: NativeOps, num_tokens: int) -> None:
    x, residual, weight = randn(num_tokens, 64), randn(num_tokens, 64, seed=1), randn(64, 64)
    norm = Norm(randn(64), EPS)
    torch_ops = TorchOps()
    for ours, expected in (
        (ops.silu_mul(x), torch_ops.silu_mul(x)),
        (ops.gelu_mul(x), torch_ops.gelu_mul(x)),
        *zip(
            ops.add_rms_norm(x, residual.clone(), norm),
            torch_ops.add_rms_norm(x, residual.clone(), norm),
            strict=True,
        ),
    ):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    table = packed(WeightKind.BF16, weight)
    torch.testing.assert_close(ops.embed(torch.tensor([3]), table, 64, 2.5), weight[3:4].bfloat16().float() * 2.5)
    stream, product = ops.project(residual.clone(), x, norm, table, None, gated=False)
    assert_near(product, torch_ops.rms_norm(x + residual, norm) @ weight.T, 0.06)
    torch.testing.assert_close(stream, x + residual)
    assert_near(ops.linear(x, table), x @ weight.T, 0.06)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_logits_of_a_vocabulary_that_ends_within_a_panel(ops: NativeOps, num_tokens: int) -> None:
    room = large_page_room(packed_bytes(WeightKind.Q8, 70, 64), torch.device("cpu"))
    table = as_packed(room, WeightKind.Q8, 70, 64)
    table.as_strided((80, table.shape[1]), table.stride()).copy_(packed(WeightKind.Q8, randn(80, 64)))
    hidden = randn(num_tokens, 64)
    assert_near(ops.logits(hidden, table), hidden @ unpacked(ops, table, 64).T, 0.06)


def test_a_broken_token_breaks_its_own_results_only(ops: NativeOps) -> None:
    for num_tokens in (3, 40):
        hidden, weight = randn(num_tokens, 64), packed(WeightKind.Q4, randn(32, 64))
        hidden[1, 5] = torch.nan
        assert ops.logits(hidden, weight).isfinite().all(-1).tolist() == [token != 1 for token in range(num_tokens)]


@pytest.mark.parametrize("rotary_dim", [32, 16])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("cache_type", [torch.float32, torch.bfloat16])
def test_rope_and_store(ops: NativeOps, rotary_dim: int, with_norms: bool, cache_type: torch.dtype) -> None:
    qkv, angles = randn(3, (4 + 2 * 2) * 32), randn(16, rotary_dim // 2)
    norms = [Norm(randn(32), EPS), Norm(randn(32) + 2, EPS)] if with_norms else []
    positions, slots = torch.tensor([5, 0, 9], dtype=torch.int32), torch.tensor([-1, 6, 1])
    found = []
    for kernels in (ops, TorchOps()):
        caches = [torch.zeros(2, 4, 2, 32), torch.zeros(2, 4, 2, 32)]
        if kernels is ops:  # there keys and values of a page may lie together
            caches = list(torch.zeros(2, 2, 4, 2, 32, dtype=cache_type).unbind(1))
        table = torch.cat((angles.cos(), angles.sin()), -1)
        q = kernels.rope_store(qkv, HeadPlaces(positions, table, slots, *caches, *norms))
        found.append([q, *(cache.float() for cache in caches)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5 if cache_type == torch.float32 else 5e-3)


def test_without_a_compiler_the_message_tells_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match="apt install g\\+\\+"):
        native_library.compile_native(LEVELS[0], tmp_path / "native.so")


def test_a_processor_gets_the_best_level_that_it_has_all_of() -> None:
    amx, avx2 = native_library.X86_LEVELS[0], native_library.X86_LEVELS[-1]
    assert native_library.best_level(frozenset(amx.cpu_flags)) == amx
    assert native_library.best_level(frozenset((*avx2.cpu_flags, "amx_tile"))) == avx2
    assert native_library.best_level(frozenset()).cpu_flags == ()
