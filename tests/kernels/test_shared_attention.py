"""Decodes that read their common prefix together get what each would get alone.

The tiles and plain torch's attention over them are tested everywhere; the Triton kernel on a GPU or, where triton is
installed, in its interpreter: ``TRITON_INTERPRET=1 scripts/test tests/kernels/test_shared_attention.py``.
"""

from __future__ import annotations

import os
import types
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels.interface import AttentionKernel, AttentionShape, BatchLayout
from radixserve.kernels.native_ops import NativeAttention, NativeOps
from radixserve.kernels.select import BackendUnavailable, select_native
from radixserve.kernels.shared_prefix import PrefixGroups, SharedPrefixRule, pack_tiles, packed_size, unpack_tiles
from radixserve.kernels.torch_attention import TorchAttention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
on_device = (lambda test: test) if INTERPRETED else pytest.mark.gpu
GROUPS = [
    [(3, 64)],  # (decodes, common tokens)
    [(2, 480), (5, 112), (9, 48)],
    [(17, 640), (2, 16)],
    [],
]


@dataclass
class Case:
    """Decodes in shuffled order, ``groups`` of which share pages, and ``singles``."""

    layout: BatchLayout
    groups: PrefixGroups
    num_pages: int

    @classmethod
    def make(
        cls,
        groups: list[tuple[int, int]],
        singles: int,
        page_size: int,
        padding: int = 0,
        seed: int = 0,
        device: torch.device = DEVICE,
    ) -> Case:
        rng = np.random.default_rng(seed)
        sizes = [size for size, _ in groups]
        count = sum(sizes) + singles
        shuffled = rng.permutation(count).astype(np.int32)
        parts = [np.sort(part) for part in np.split(shuffled, np.cumsum(sizes))[: len(groups)]]
        lens = rng.integers(1, 90, count)
        for part, (_, length) in zip(parts, groups, strict=True):
            lens[part] += length
        columns = -(-int(lens.max()) // page_size)
        table = rng.permutation((count + 2) * columns).astype(np.int32).reshape(count + 2, columns)
        rows = rng.permutation(count + 2)[:count]
        for part, (_, length) in zip(parts, groups, strict=True):
            table[rows[part], : length // page_size] = table[rows[part[0]], : length // page_size]
        padded = [np.pad(array, (0, padding)).astype(np.int32) for array in (rows, lens)]
        arrays = (*padded, np.arange(count + padding + 1, dtype=np.int32), table)
        layout = BatchLayout(count + padding, page_size, *(torch.from_numpy(a).to(device) for a in arrays), *arrays)
        starts = np.cumsum([0, *sizes]).astype(np.int32)
        found = PrefixGroups(
            np.concatenate([np.zeros(0, np.int32), *parts]), starts, np.array([n for _, n in groups], np.int32)
        )
        return cls(layout, found, table.size)

    def packed(self, tile_members: int) -> np.ndarray:
        num_seqs = self.layout.num_decodes
        real = self.layout.kv_lens_host[self.layout.kv_lens_host > 0]
        packed = pack_tiles(self.groups, real, num_seqs, tile_members)
        assert len(packed) == packed_size(num_seqs, tile_members)
        return packed

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """One decode at a time, in fp32."""
        out = torch.zeros_like(q, dtype=torch.float32)
        for s, length in enumerate(self.layout.kv_lens_host.tolist()):
            pages = self.layout.page_table[self.layout.rows_host[s]].long()
            k, v = (c[pages].flatten(0, 1)[:length].float().transpose(0, 1) for c in (k_cache, v_cache))
            if length:
                query = q[s].float()[None, :, None]
                out[s] = F.scaled_dot_product_attention(query, k[None], v[None], enable_gqa=True)[0, :, 0]
        return out


@pytest.mark.parametrize("tile_members", [2, 3, 8, 64])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_tiles_hold_each_shared_token_once_a_tile(groups: list[tuple[int, int]], tile_members: int) -> None:
    case = Case.make(groups, singles=2, page_size=16, padding=3)
    num_seqs, kv_lens = case.layout.num_decodes, case.layout.kv_lens_host
    tiles = unpack_tiles(torch.from_numpy(case.packed(tile_members)), num_seqs, tile_members)
    assert all(array.data_ptr() % 16 == tiles.lens.data_ptr() % 16 for array in tiles)
    prefixes = np.zeros(num_seqs, np.int32)
    seen: list[int] = []
    for tile, (length, places) in enumerate(zip(tiles.lens[num_seqs:].tolist(), tiles.members.tolist(), strict=True)):
        members = [place for place in places if place >= 0]
        assert places == [*members, *[-1] * (tile_members - len(members))]
        assert (len(members) >= 2) == (length > 0) and len(members) != 1
        assert tiles.places[members].tolist() == [tile * tile_members + place for place in range(len(members))]
        prefixes[members] = length
        seen += members
    assert len(seen) == len(set(seen)) and set(seen) <= set(case.groups.members.tolist())
    assert len(case.groups.members) - len(seen) <= (len(groups) if tile_members == 2 else 0)
    assert tiles.lens[:num_seqs].tolist() == (kv_lens - prefixes).tolist()
    assert (tiles.places < 0).sum() == num_seqs - len(seen)
    expected = np.repeat([n for _, n in groups], [size for size, _ in groups])
    assert all(prefixes[m] in (0, n) for m, n in zip(case.groups.members.tolist(), expected.tolist(), strict=True))


def test_reading_once_must_save_enough_tokens_and_a_share_of_all() -> None:
    groups = Case.make([(9, 160), (2, 32)], singles=0, page_size=16).groups
    saved = (9 - 2) * 160 + (2 - 1) * 32  # the nine are two tiles
    assert SharedPrefixRule(8, saved, 0.5).pays(groups, 2 * saved)
    assert not SharedPrefixRule(8, saved + 1, 0.5).pays(groups, 2 * saved)
    assert not SharedPrefixRule(8, saved, 0.5).pays(groups, 2 * saved + 2)


@pytest.fixture(scope="module")
def native_ops() -> NativeOps:
    try:
        return select_native(2, print)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "dtype"), [(9, 3, 64, "float32"), (8, 1, 128, "bfloat16")])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_a_cpu_reads_prefixes_once_and_gives_the_same(
    groups: list[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    page_size: int,
    native: bool,
    request: pytest.FixtureRequest,
) -> None:
    cpu, torch_dtype = torch.device("cpu"), getattr(torch, dtype)
    case = Case.make(groups, singles=3, page_size=page_size, seed=len(groups) + page_size, device=cpu)
    k_cache, v_cache = (torch.randn(case.num_pages, page_size, kv_heads, dim).to(torch_dtype) for _ in range(2))
    q = torch.randn(case.layout.num_decodes, q_heads, dim).to(torch.float32 if native else torch_dtype)
    softcap = 2.0 if native and dtype == "float32" else None  # which torch does not do for prefixes
    shape = AttentionShape(q_heads, kv_heads, dim, page_size, torch_dtype, 0.2, softcap, windows=(None, 40))
    kernel: AttentionKernel = TorchAttention(shape, cpu, reads_shared=True)
    if native:
        kernel = NativeAttention(shape, request.getfixturevalue("native_ops"), reads_shared=True)
    assert kernel.shared_prefixes is not None
    members = kernel.shared_prefixes.tile_members
    kernel.plan(case.layout)
    alone = [kernel.run(q, k_cache, v_cache, window).float() for window in shape.windows]
    num_seqs = case.layout.num_decodes
    kernel.plan(replace(case.layout, shared=unpack_tiles(torch.from_numpy(case.packed(members)), num_seqs, members)))
    together = [kernel.run(q, k_cache, v_cache, window).float() for window in shape.windows]
    assert float((together[0] - alone[0]).norm() / alone[0].norm()) < (1e-6 if dtype == "float32" else 1e-2)
    assert torch.equal(together[1], alone[1])  # windows go on as before


@on_device
@pytest.mark.parametrize(("page_size", "start_units"), [(1, 3), (16, 9)])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "dtype"),
    [
        (8, 8, 64, "float16"),
        (16, 8, 128, "bfloat16"),
        (12, 3, 64, "float16"),
        (9, 3, 64, "float16"),
        (8, 1, 128, "bfloat16"),
        (4, 4, 96, "bfloat16"),
    ],
)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_triton_kernel_reads_prefixes_once_and_gives_what_torch_gives(
    groups: list[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    page_size: int,
    start_units: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from radixserve.kernels.triton_attention import DecodeTuning, TritonDecodeAttention
    from radixserve.kernels.triton_shared_attention import TritonSharedAttention

    if INTERPRETED:
        few = types.SimpleNamespace(multi_processor_count=6)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    torch_dtype = torch.float32 if INTERPRETED else getattr(torch, dtype)  # the interpreter has no bf16 products
    case = Case.make(groups, singles=3, page_size=page_size, padding=2, seed=len(groups) + page_size)
    num_seqs = case.layout.num_decodes
    shape = (case.num_pages, page_size, kv_heads, dim)
    k_cache, v_cache = (torch.randn(shape, device=DEVICE).to(torch_dtype) for _ in range(2))
    q = torch.randn(num_seqs, q_heads, dim, device=DEVICE).to(torch_dtype)
    heads = AttentionShape(q_heads, kv_heads, dim, page_size, torch_dtype)
    plain = TritonDecodeAttention(heads, num_seqs + 4, DEVICE, pdl=not INTERPRETED)
    kernel = TritonSharedAttention(plain, num_seqs + 4, DEVICE, tuning=DecodeTuning(start_units=start_units))
    members = kernel.rule.tile_members
    tiles = unpack_tiles(torch.from_numpy(case.packed(members)).to(DEVICE), num_seqs, members)
    kernel.plan_decode(case.layout, tiles, num_seqs)
    first, second = (torch.full_like(q, float("nan")) for _ in range(2))
    kernel.run_decode(q, k_cache, v_cache, first)
    kernel.run_decode(q, k_cache, v_cache, second)
    live = case.layout.kv_lens > 0  # the others are padding
    reference = case.attend(q, k_cache, v_cache)[live]
    assert float((first[live].float() - reference).norm() / reference.norm()) < (1e-5 if INTERPRETED else 1e-2)
    assert torch.equal(first[live], second[live])
