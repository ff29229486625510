"""The CUDA kernels against plain torch, on fresh random inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout, HeadPlaces, Norm
from radixserve.kernels.torch_ops import TorchOps

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def make_layout(kv_lens: Sequence[int], queries: Sequence[int], page_size: int) -> tuple[BatchLayout, int]:
    """Decodes first; shuffled pages and rows. Returns the layout and how many pages a cache needs."""
    rng = np.random.default_rng()
    lens = np.array(kv_lens, np.int32)
    columns = max(1, -(-int(lens.max()) // page_size))
    max_rows = len(lens) + 3
    table = rng.permutation(max_rows * columns).astype(np.int32).reshape(max_rows, columns)
    rows = rng.permutation(max_rows)[: len(lens)].astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    on_device = [torch.from_numpy(array).to(DEVICE) for array in (rows, lens, starts, table)]
    num_decodes = sum(count == 1 for count in queries)
    return BatchLayout(num_decodes, page_size, *on_device, rows, lens, starts, table), max_rows * columns


def attend(layout: BatchLayout, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """The oracle, one sequence at a time in fp32."""
    out = torch.zeros_like(q, dtype=torch.float32)
    kv_heads, dim = k_cache.shape[2:]
    for s, length in enumerate(layout.kv_lens_host.tolist()):
        first, last = layout.query_starts_host[s : s + 2].tolist()
        pages = layout.page_table[layout.rows_host[s]].long()
        k, v = (
            cache[pages].reshape(-1, kv_heads, dim)[:length].float().transpose(0, 1) for cache in (k_cache, v_cache)
        )
        mask = torch.ones(last - first, length, dtype=torch.bool, device=DEVICE).tril(length - (last - first))
        if length:
            queries = q[first:last].float().transpose(0, 1)
            result = F.scaled_dot_product_attention(queries[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
            out[first:last] = result[0].transpose(0, 1)
    return out


@pytest.mark.parametrize(("page_size", "start_units"), [(1, 5), (16, 0), (64, 2)])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 8, 64), (8, 1, 128), (8, 8, 96)]
)
@pytest.mark.parametrize("kv_lens", [[1], [2500], [700, 1, 33, 0, 64], list(range(5, 2005, 31))])
def test_triton_decode_attention_equals_torch(
    kv_lens: list[int], q_heads: int, kv_heads: int, dim: int, page_size: int, start_units: int
) -> None:
    from radixserve.kernels.triton_attention import DecodeTuning, TritonDecodeAttention

    layout, num_pages = make_layout(kv_lens, [1] * len(kv_lens), page_size)
    k_cache, v_cache = randn(num_pages, page_size, kv_heads, dim), randn(num_pages, page_size, kv_heads, dim)
    q = randn(len(kv_lens), q_heads, dim)
    shape, tuning = AttentionShape(q_heads, kv_heads, dim, page_size, BF16), DecodeTuning(start_units=start_units)
    kernel = TritonDecodeAttention(shape, len(kv_lens), DEVICE, tuning=tuning)
    kernel.plan_decode(layout, len(kv_lens))
    first, second = (torch.full_like(q, float("nan")) for _ in range(2))
    kernel.run_decode(q, k_cache, v_cache, first)
    kernel.run_decode(q, k_cache, v_cache, second)
    live = layout.kv_lens > 0  # the others are padding
    assert error(first[live], attend(layout, q, k_cache, v_cache)[live]) < 1e-2
    assert torch.equal(first[live], second[live])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(8, 4, 256), (4, 1, 256), (32, 8, 128), (8, 8, 96)])
def test_windows_and_capped_scores_equal_torch(q_heads: int, kv_heads: int, dim: int, softcap: float | None) -> None:
    pytest.importorskip("flashinfer")
    from radixserve.kernels.select import select_attention
    from radixserve.kernels.torch_attention import TorchAttention

    queries, cached = [1, 1, 1, 70, 257], [900, 17, 3000, 90, 0]
    layout, num_pages = make_layout([a + b for a, b in zip(queries, cached, strict=True)], queries, 16)
    k_cache, v_cache = randn(num_pages, 16, kv_heads, dim), randn(num_pages, 16, kv_heads, dim)
    q = randn(sum(queries), q_heads, dim)
    windows = (None, 64, 1000)
    shape = AttentionShape(q_heads, kv_heads, dim, 16, BF16, 0.1, softcap, windows)
    oracle = TorchAttention(shape, DEVICE)
    oracle.plan(layout)
    for backend in ("triton", "flashinfer") if dim != 96 else ("triton",):
        kernel = select_attention(backend, shape, DEVICE, 8)
        kernel.plan(layout)
        for window in windows:
            reference = oracle.run(q, k_cache, v_cache, window)
            assert error(kernel.run(q, k_cache, v_cache, window), reference) < 1e-2, (backend, window)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 1, 70, 300], [257]])
def test_split_attention_equals_torch_in_mixed_steps(queries: list[int], page_size: int) -> None:
    pytest.importorskip("flashinfer")
    from radixserve.kernels.flashinfer_attention import FlashInferAttention
    from radixserve.kernels.split_attention import SplitAttention
    from radixserve.kernels.triton_attention import TritonDecodeAttention
    from radixserve.kernels.triton_extend import TritonExtendAttention

    kv_lens = [count + cached for count, cached in zip(queries, [300, 17, 0, 90], strict=False)]
    layout, num_pages = make_layout(kv_lens, queries, page_size)
    k_cache, v_cache = randn(num_pages, page_size, 8, 128), randn(num_pages, page_size, 8, 128)
    q = randn(sum(queries), 16, 128)
    shape = AttentionShape(16, 8, 128, page_size, BF16)
    chunks = FlashInferAttention(shape, DEVICE)
    reference = attend(layout, q, k_cache, v_cache)
    decodes, unplanned = TritonDecodeAttention(shape, 8, DEVICE), TritonExtendAttention(shape)
    for kernel in (SplitAttention(decodes, chunks, unplanned), chunks):
        kernel.plan(layout)
        assert error(kernel.run(q, k_cache, v_cache), reference) < 1e-2


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (64, None), (1000, 3.0)])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (4, 1, 256), (8, 8, 96)]
)
@pytest.mark.parametrize("queries", [[1, 1, 70, 300], [1, 1], [257, 2]])
def test_padded_steps_planned_on_the_device_equal_torch(
    queries: list[int], q_heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None
) -> None:
    from radixserve.engine.step_inputs import PaddedSize, StepInputs, pad
    from radixserve.kernels.split_attention import SplitAttention
    from radixserve.kernels.torch_attention import TorchAttention
    from radixserve.kernels.triton_attention import TritonDecodeAttention
    from radixserve.kernels.triton_extend import TritonExtendAttention

    cached = [300, 17, 900, 0]
    layout, num_pages = make_layout([a + b for a, b in zip(queries, cached, strict=False)], queries, 16)
    k_cache, v_cache = randn(num_pages, 16, kv_heads, dim), randn(num_pages, 16, kv_heads, dim)
    tokens, first = sum(queries), layout.num_decodes
    q = randn(tokens + 9, q_heads, dim)
    shape = AttentionShape(q_heads, kv_heads, dim, 16, BF16, 0.1, softcap, (window,))
    oracle = TorchAttention(shape, DEVICE)
    oracle.plan(layout)
    reference = oracle.run(q[:tokens], k_cache, v_cache, window)

    nothing = np.zeros(0, np.int32)
    sequences = (layout.rows_host, layout.kv_lens_host, layout.query_starts_host)
    size = PaddedSize(tokens + 9, first + 3, 6)
    padded = pad(StepInputs(*[nothing] * 3, *sequences, *[nothing] * 4), first, size)
    on_device = [torch.from_numpy(array).to(DEVICE) for array in (padded.rows, padded.kv_lens, padded.query_starts)]
    unplanned = BatchLayout(size.decodes, 16, *on_device, layout.page_table, *[nothing] * 3, layout.page_table_host)
    decodes = TritonDecodeAttention(shape, size.decodes, DEVICE)
    kernel = SplitAttention(decodes, None, TritonExtendAttention(shape))
    kernel.plan(unplanned)
    assert error(kernel.run(q, k_cache, v_cache, window)[:tokens], reference) < 1e-2


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("size", [576, 1024, 4096])
def test_norms_and_activation_equal_torch(tokens: int, size: int) -> None:
    from radixserve.kernels.triton_ops import gelu_mul, rms_norm, silu_mul

    x, residual, weight = randn(tokens, size), randn(tokens, size), randn(size)
    total = x.float() + residual.float()
    assert (
        error(rms_norm(x, Norm(weight, 1e-6), None, True), F.rms_norm(x.float(), (size,), weight.float(), 1e-6)) < 1e-2
    )
    normed = rms_norm(x, Norm(weight, 1e-6), residual, True)
    assert error(residual, total) < 1e-2
    assert error(normed, F.rms_norm(total, (size,), weight.float(), 1e-6)) < 1e-2
    gate_up = randn(tokens, 2 * size)
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert error(silu_mul(gate_up, True), F.silu(gate) * up) < 1e-2
    assert error(gelu_mul(gate_up, True), F.gelu(gate, approximate="tanh") * up) < 1e-2
    wide = Norm(weight.float(), 1e-6)
    assert error(rms_norm(x, wide, None, True), F.rms_norm(x, weight.shape, weight, 1e-6)) < 1e-2


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "rotary"), [(16, 8, 128, 128), (9, 3, 64, 64), (4, 4, 96, 48)])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_rope_store_equals_torch_and_skips_padding(
    q_heads: int, kv_heads: int, dim: int, rotary: int, qk_norm: bool
) -> None:
    from radixserve.kernels.triton_ops import rope_store

    tokens = 37
    qkv, positions = (
        randn(tokens, (q_heads + 2 * kv_heads) * dim),
        torch.randint(0, 900, (tokens,), device=DEVICE).int(),
    )
    slots = torch.randperm(160, device=DEVICE)[:tokens]
    slots[5] = slots[36] = -1
    cos_sin = randn(900, rotary, dtype=torch.float32)
    norms = [Norm(randn(dim), 1e-6), Norm(randn(dim), 1e-6)] if qk_norm else []
    caches = [randn(10, 16, kv_heads, dim) for _ in range(2)]
    expected = [cache.float() for cache in caches]
    q = rope_store(qkv, HeadPlaces(positions, cos_sin, slots, *caches, *norms), True)
    wide_norms = [Norm(norm.weight.float(), norm.eps) for norm in norms]
    wide = HeadPlaces(positions, cos_sin, slots, *expected, *wide_norms)
    assert error(q, TorchOps().rope_store(qkv.float(), wide)) < 1e-2
    assert error(caches[0], expected[0]) < 1e-2
    assert error(caches[1], expected[1]) < 1e-2


def sampling_rules(temperatures: Sequence[float], vocab: int, seeds: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tables of a sampler whose rows have no rules but a temperature."""
    rows = len(temperatures)
    floats = torch.tensor([[temperature, 1.0, 0.0] for temperature in temperatures], device=DEVICE)
    seeds = torch.arange(rows, device=DEVICE) if seeds is None else seeds
    return floats, torch.stack((seeds, torch.full_like(seeds, vocab)), dim=1)


def test_sampling_is_greedy_at_zero_temperature_and_flags_bad_rows() -> None:
    from radixserve.kernels.triton_sampling import sample

    logits = randn(6, 151_936, dtype=torch.float32)
    logits[1, 70_000] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 151_935] = -3.0
    logits[5, 9] = logits[5, 100_000] = 30.0
    rows = torch.tensor([3, 1, 2, 7, 0, 5], device=DEVICE, dtype=torch.int32)
    last_tokens = torch.full((8,), -7, device=DEVICE)
    rules = sampling_rules([0.0] * 8, 151_936)
    tokens, failed = sample(logits, rows, *rules, torch.zeros(6, device=DEVICE).int(), last_tokens)
    assert failed.tolist() == [0, 1, 1, 1, 0, 0]
    assert tokens[0] == logits[0].argmax() and tokens[4] == 151_935 and tokens[5] == 9
    assert last_tokens.tolist() == [151_935, 0, 0, int(tokens[0]), -7, 9, -7, 0]


def test_sampling_follows_the_softmax_and_depends_on_seed_and_position_only() -> None:
    from radixserve.kernels.triton_sampling import sample

    rows, vocab, temperature = 40_000, 64, 0.7
    one = randn(1, vocab, dtype=torch.float32) * 1.5
    logits = one.expand(rows, vocab)
    seeds = torch.randint(-(2**62), 2**62, (rows // 2,), device=DEVICE).repeat(2)
    rules = sampling_rules([temperature] * rows, vocab, seeds)
    num_known = torch.arange(rows, device=DEVICE).int()
    last_tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    tokens, failed = sample(logits, num_known, *rules, num_known, last_tokens)
    assert not failed.any()
    share = torch.bincount(tokens.long(), minlength=vocab) / rows
    expected = (one[0] / temperature).softmax(-1)
    # Standard deviation of each share; five of them leave a wrong verdict once in 30,000 runs.
    assert ((share - expected).abs() < 5 * (expected / rows).sqrt() + 1e-4).all()
    some = num_known[700:800].flip(0)
    again, _ = sample(logits[:100].contiguous(), some, *rules, some, last_tokens)
    assert torch.equal(again, tokens[700:800].flip(0))


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [64, 151_936])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (20, 0.95, 0.0),
        (1, 1.0, 0.0),
        (3000, 0.7, 0.0),
        (0, 0.9, 0.0),
        (0, 0.05, 0.0),
        (0, 1.0, 0.2),
        (50, 1.0, 0.0),
        (120, 0.9, 0.0),
    ],
)
def test_filtered_draws_stay_inside_the_set_and_reach_its_ends(
    top_k: int, top_p: float, min_p: float, vocab: int, spread: float
) -> None:
    """One distribution, drawn from many times: the set of tokens is that of a sort in fp64."""
    from radixserve.kernels.triton_sampling import sample

    draws, temperature = 256, 0.8
    one = randn(vocab, dtype=torch.float32) * spread
    top_k = min(top_k, vocab) or vocab
    floats, ints = sampling_rules([temperature] * draws, vocab)
    floats[:, 1], floats[:, 2], ints[:, 1] = top_p, min_p, top_k
    rows = torch.arange(draws, device=DEVICE).int()
    last_tokens = torch.zeros(draws, dtype=torch.int64, device=DEVICE)
    tokens, failed = sample(one.expand(draws, vocab), rows, floats, ints, rows, last_tokens)
    assert not failed.any()
    probs = (one.double() / temperature).softmax(0).sort(descending=True).values
    probs[top_k:] = 0
    before = probs.cumsum(0) - probs
    kept = (before < top_p * probs.sum()) & (probs >= min_p * probs[0]) & (probs > 0)
    size = int(kept.sum())
    ranks = (one[None] > one[tokens.long()][:, None]).sum(1)
    # Weights are summed in fp32, which may move the border of a large set by a few tokens.
    assert int(ranks.max()) < size + 1e-3 * size + (min_p > 0)
    expected = (probs * kept)[: max(size, 1)] / (probs * kept).sum()
    mean = float((expected * torch.arange(len(expected), device=DEVICE)).sum())
    deviation = float((expected * (torch.arange(len(expected), device=DEVICE) - mean) ** 2).sum()) ** 0.5
    assert abs(float(ranks.double().mean()) - mean) < 6 * deviation / draws**0.5 + 1e-3


def test_a_top_p_that_rounding_decides_fails_nobody() -> None:
    """The candidates' weight is just about the share: summed up in another order it may be less."""
    from radixserve.kernels.triton_sampling import sample

    vocab, lanes, rows, temperature = 9000, 4096, 256, 0.8
    one = randn(vocab, dtype=torch.float32)
    best = F.pad(one, (0, 3 * lanes - vocab), value=-torch.inf).view(3, lanes).amax(0).sort(descending=True).values
    bound = (best[lanes // 2 - 1].view(torch.int32) & ~0xFFF).view(torch.float32)
    weights = ((one.double() - one.max()) / temperature).exp()
    floats, ints = sampling_rules([temperature] * rows, vocab)
    floats[:, 1] = weights[one >= bound].sum() / weights.sum() + torch.linspace(-3e-7, 3e-7, rows, device=DEVICE)
    row, last_tokens = torch.arange(rows, device=DEVICE).int(), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    _, failed = sample(one.expand(rows, vocab), row, floats, ints, row, last_tokens)
    assert not failed.any()


def test_decode_inputs_find_each_rows_token_position_and_slot() -> None:
    from radixserve.kernels.triton_ops import decode_inputs

    layout, _ = make_layout([5, 1, 64, 17, 0], [1] * 5, 16)
    last_tokens = torch.randint(0, 1000, (9,), device=DEVICE)
    ids, positions, slots = decode_inputs(layout.rows, layout.kv_lens, layout.page_table, last_tokens, 16)
    table, rows = layout.page_table_host, layout.rows_host
    assert ids.tolist() == last_tokens[layout.rows.long()].tolist()
    assert positions.tolist() == [4, 0, 63, 16, 0]
    expected = [table[rows[s], p // 16] * 16 + p % 16 for s, p in enumerate((4, 0, 63, 16))]
    assert slots.tolist() == [*expected, -1]


@pytest.mark.parametrize("m", [1, 5, 16, 30, 64])
@pytest.mark.parametrize(("n", "k"), [(1024, 576), (4096, 1024), (1000, 3072), (512, 12288)])
@pytest.mark.parametrize("mode", ["plain", "residual", "gated"])
def test_fused_linear_equals_torch(m: int, n: int, k: int, mode: str) -> None:
    from radixserve.kernels.triton_linear import fused_linear

    gated = mode == "gated"
    x, weight, norm = randn(m, k), randn(n * (1 + gated), k) / k**0.5, Norm(randn(k), 1e-6) if m == 1 else None
    residual = randn(m, n) if mode == "residual" else None
    normed = x.float() if norm is None else F.rms_norm(x.float(), (k,), norm.weight.float(), 1e-6)
    reference = normed @ weight.float().t()
    if gated:
        reference = F.silu(reference[:, :n]) * reference[:, n:]
    if residual is not None:
        reference += residual.float()
    assert error(fused_linear(x, weight, norm=norm, gated=gated, residual=residual), reference) < 1e-2


@pytest.mark.parametrize("tokens", [1, 20, 65, 200, 300])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 4096), (576, 1536)])
def test_projections_of_the_stream_equal_torch(tokens: int, hidden: int, inner: int) -> None:
    from radixserve.kernels.cuda_ops import CudaOps

    stream, y, norm = randn(tokens, hidden), randn(tokens, inner), Norm(randn(hidden), 1e-6)
    down, gate_up = randn(hidden, inner) / inner**0.5, randn(2 * inner, hidden) / hidden**0.5
    wide = stream.float() + y.float() @ down.float().t()
    normed = F.rms_norm(wide, (hidden,), norm.weight.float(), 1e-6)
    gate, up = (normed @ gate_up.float().t()).chunk(2, dim=-1)
    ops = CudaOps(pdl=True)
    added, pending = ops.add_linear(stream.clone(), y, down)
    added, product = ops.project(added, pending, norm, gate_up, None, gated=True)
    assert error(added, wide) < 1e-2
    assert error(product, F.silu(gate) * up) < 2e-2
    added, pending = ops.add_linear(stream.clone(), y, down)
    if pending is not None:
        assert error(ops.add_rms_norm(pending, added, norm)[0], normed) < 1e-2
