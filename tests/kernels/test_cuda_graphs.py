"""A model's decode steps in CUDA graphs give what plain torch gives, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixserve.engine.graphs import DecodeGraphs, graph_batch_sizes, mixed_token_counts, shared_batch_sizes
from radixserve.kernels.shared_prefix import NO_GROUPS, PrefixGroups, SharedTiles

PAGE_SIZE, MAX_ROWS, COLUMNS, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 16, 12, 8, 3, 8, 4, 64, 256, 1000
BF16 = torch.bfloat16


def test_graph_sizes_cover_every_batch_up_to_the_largest() -> None:
    assert graph_batch_sizes(1) == [1]
    assert graph_batch_sizes(3) == [1, 2, 3]
    assert graph_batch_sizes(256)[-1] == 256
    sizes = graph_batch_sizes(1000)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 1000


def test_mixed_graphs_reach_to_the_longest_step_or_to_where_they_stop_paying() -> None:
    assert mixed_token_counts(20) == [20]
    assert mixed_token_counts(48) == [32, 48]
    assert mixed_token_counts(8192)[-1] == mixed_token_counts(2048)[-1] == 2048


def test_few_graphs_for_shared_prefixes_cover_every_batch() -> None:
    assert shared_batch_sizes(graph_batch_sizes(3)) == [3]
    sizes = shared_batch_sizes(graph_batch_sizes(300))
    assert sizes[:4] == [8, 16, 32, 64] and sizes[-1] == 300 and len(sizes) < len(graph_batch_sizes(300)) / 2


class TinyModel:
    """Embedding, attention layers without feed-forward, tied head; weights from one seed on ``device``."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, device=device, generator=generator) / shape[-1] ** 0.5).to(BF16)

        self.embedding = weight(VOCAB, HIDDEN) * 16
        self.qkv = [weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN) for _ in range(LAYERS)]
        self.out = [weight(HIDDEN, HEADS * DIM) for _ in range(LAYERS)]
        self.norm = torch.ones(HIDDEN, device=device, dtype=BF16)
        angles = torch.rand(PAGE_SIZE * COLUMNS, DIM // 2, device=device, generator=generator)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)


def make_caches(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(2)
    shape = (2, MAX_ROWS * COLUMNS, PAGE_SIZE, KV_HEADS, DIM)
    return [torch.randn(*shape, device=device, generator=generator).to(BF16) for _ in range(LAYERS)]


def one_group(num_seqs: int, shared_len: int) -> PrefixGroups:
    """Of all decodes, if they share something."""
    if not shared_len or num_seqs < 2:
        return NO_GROUPS
    return PrefixGroups(*(np.array(values, np.int32) for values in (range(num_seqs), (0, num_seqs), (shared_len,))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_shared", [0, 3])  # pages with which all rows begin
def test_replayed_decode_steps_equal_eager_torch_and_padding_touches_nothing(num_shared: int) -> None:
    from radixserve.kernels.cuda_ops import CudaOps
    from radixserve.kernels.interface import AttentionShape, BatchLayout, HeadPlaces, Norm
    from radixserve.kernels.torch_attention import TorchAttention
    from radixserve.kernels.torch_ops import TorchOps
    from radixserve.kernels.triton_attention import TritonDecodeAttention
    from radixserve.kernels.triton_ops import decode_inputs
    from radixserve.kernels.triton_sampling import sample
    from radixserve.kernels.triton_shared_attention import TritonSharedAttention

    device = torch.device("cuda")
    model, ops = TinyModel(device), CudaOps(pdl=True)
    norm, head_norm = Norm(model.norm, 1e-6), Norm(model.norm[:DIM], 1e-6)
    rng = np.random.default_rng(3)
    table_host = rng.permutation(MAX_ROWS * COLUMNS).astype(np.int32).reshape(MAX_ROWS, COLUMNS)
    table_host[:, :num_shared] = table_host[0, :num_shared]
    table = torch.from_numpy(table_host).to(device)
    attention = TritonDecodeAttention(AttentionShape(HEADS, KV_HEADS, DIM, PAGE_SIZE, BF16), MAX_ROWS, device)
    sharing = TritonSharedAttention(attention, MAX_ROWS, device)
    last_tokens = torch.zeros(MAX_ROWS + 1, dtype=torch.int64, device=device)
    greedy = torch.tensor([[0.0, 1.0, 0.0]] * (MAX_ROWS + 1), device=device)
    seeds_top_ks = torch.full((MAX_ROWS + 1, 2), VOCAB, device=device)
    caches = make_caches(device)
    empty = np.zeros(0, np.int32)

    def layout_of(rows: torch.Tensor, kv_lens: torch.Tensor) -> BatchLayout:
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
        return BatchLayout(len(rows), PAGE_SIZE, rows, kv_lens, starts, table, empty, empty, empty, table_host)

    def decode(rows: torch.Tensor, kv_lens: torch.Tensor, shared: SharedTiles | None) -> torch.Tensor:
        ids, positions, slots = decode_inputs(rows, kv_lens, table, last_tokens, PAGE_SIZE)
        attention.plan_decode(layout_of(rows, kv_lens), len(rows))
        if shared is not None:
            sharing.plan_decode(layout_of(rows, kv_lens), shared, len(rows))
        x, pending = torch.nn.functional.embedding(ids, model.embedding), None
        for cache, qkv_weight, out_weight in zip(caches, model.qkv, model.out, strict=True):
            x, qkv = ops.project(x, pending, norm, qkv_weight, None, gated=False)
            q = ops.rope_store(qkv, HeadPlaces(positions, model.cos_sin, slots, *cache, head_norm, head_norm))
            attended = torch.empty_like(q)
            (attention if shared is None else sharing).run_decode(q, cache[0], cache[1], attended)
            x, pending = ops.add_linear(x, attended.flatten(1), out_weight)
        normed = ops.rms_norm(x, norm) if pending is None else ops.add_rms_norm(pending, x, norm)[0]
        return sample(ops.logits(normed, model.embedding), rows, greedy, seeds_top_ks, kv_lens, last_tokens)

    plain_caches, plain, oracle = (
        make_caches(device),
        TorchOps(),
        TorchAttention(AttentionShape(HEADS, KV_HEADS, DIM, PAGE_SIZE, BF16), device),
    )

    def logits_of(ids: torch.Tensor, rows_host: np.ndarray, lens_host: np.ndarray) -> torch.Tensor:
        """One step of the same model in plain torch."""
        rows, kv_lens = torch.from_numpy(rows_host).to(device), torch.from_numpy(lens_host).to(device)
        starts = np.arange(len(rows_host) + 1, dtype=np.int32)
        oracle.plan(
            BatchLayout(
                len(rows),
                PAGE_SIZE,
                rows,
                kv_lens,
                torch.from_numpy(starts).to(device),
                table,
                rows_host,
                lens_host,
                starts,
                table_host,
            )
        )
        positions = (kv_lens - 1).int()
        slots = table[rows.long(), positions.long() // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        x = torch.nn.functional.embedding(ids, model.embedding)
        for cache, qkv_weight, out_weight in zip(plain_caches, model.qkv, model.out, strict=True):
            qkv = torch.nn.functional.linear(plain.rms_norm(x, norm), qkv_weight)
            q = plain.rope_store(qkv, HeadPlaces(positions, model.cos_sin, slots, *cache, head_norm, head_norm))
            x = x + torch.nn.functional.linear(oracle.run(q, cache[0], cache[1]).flatten(1), out_weight)
        return plain.logits(plain.rms_norm(x, norm), model.embedding)

    graphs = DecodeGraphs(decode, [1, 4, 12], MAX_ROWS, device, sharing.rule.tile_members if num_shared else None)
    assert not graphs.fits(1)
    graphs.capture(torch.cuda.graph_pool_handle(), lambda share: None)
    assert graphs.fits(12) and not graphs.fits(13) and not graphs.fits(0)
    for fast, slow in zip(caches, plain_caches, strict=True):
        assert torch.equal(fast, slow)
    for num_seqs in (1, 3, 4, 9, 12):
        rows = rng.permutation(MAX_ROWS)[:num_seqs].astype(np.int32)
        lens = rng.integers(num_shared * PAGE_SIZE + 1, PAGE_SIZE * COLUMNS, num_seqs).astype(np.int32)
        before = last_tokens.clone()
        expected = logits_of(before[torch.from_numpy(rows).long().to(device)], rows, lens)
        tokens, failed = graphs.replay(rows, lens, one_group(num_seqs, num_shared * PAGE_SIZE))[:, :num_seqs].long()
        assert not failed.any()
        # Rounding may decide between near ties.
        chosen = expected.gather(1, tokens[:, None])[:, 0]
        assert (expected.amax(1) - chosen < 0.05 * expected.std()).all()
        others = np.setdiff1d(np.arange(MAX_ROWS), rows)
        assert torch.equal(last_tokens[others], before[others])
        assert torch.equal(last_tokens[rows], tokens)
        for fast, slow in zip(caches, plain_caches, strict=True):
            assert (fast.float() - slow.float()).norm() < 1e-2 * slow.float().norm()
