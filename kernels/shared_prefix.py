"""Prefixes that several decodes of a step have in common: when reading them once pays, and the arrays that say so.

Decodes with a common prefix are taken in *tiles* of as many as a kernel handles in one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]


class PrefixGroups(NamedTuple):
    """Decodes of a step that begin with the same pages: ``members[starts[g]:starts[g + 1]]``, two or more, have
    ``lens[g]`` common tokens. A decode is in one group at most."""

    members: Int32s
    starts: Int32s
    lens: Int32s


_NOTHING: Int32s = np.zeros(0, np.int32)
NO_GROUPS = PrefixGroups(_NOTHING, np.zeros(1, np.int32), _NOTHING)


@dataclass(frozen=True, slots=True)
class SharedPrefixRule:
    """What a kernel makes of shared prefixes. ``tile_members``: decodes for which it reads a prefix once, at least 2.
    It must save ``min_saved_tokens`` of KV, and ``min_saved_share`` of all that the step's decodes read."""

    tile_members: int
    min_saved_tokens: int
    min_saved_share: float

    def pays(self, groups: PrefixGroups, kv_tokens: int) -> bool:
        """In a step whose decodes have ``kv_tokens`` in all."""
        sizes = np.diff(groups.starts).astype(np.int64)
        saved = int(((sizes - -(-sizes // self.tile_members)) * groups.lens).sum())
        return saved >= max(self.min_saved_tokens, self.min_saved_share * kv_tokens)


class SharedTiles(NamedTuple):
    """int32. S decodes, and T = S // 2 tiles of M members, of which the first are in use."""

    lens: Tensor  # [S + T]: KV tokens of each decode behind its shared prefix, then of each tile's; 0: not in use
    places: Tensor  # [S]: tile * M + place of each decode, or -1
    members: Tensor  # [T, M]: the decodes of each tile, -1 behind them


def packed_size(num_seqs: int, tile_members: int) -> int:
    """int32s that ``pack_tiles`` returns."""
    return _offsets(num_seqs, tile_members)[-1]


def pack_tiles(groups: PrefixGroups, kv_lens: Int32s, num_seqs: int, tile_members: int) -> Int32s:
    """``SharedTiles`` for ``num_seqs`` decodes, the first of which have ``kv_lens`` [D], in one array.

    A group is cut into equal tiles; a single decode that is left over reads its prefix alone.
    """
    members, starts, lens = groups
    places_at, members_at, end = _offsets(num_seqs, tile_members)
    packed = np.full(end, -1, np.int32)
    packed[:places_at] = 0
    packed[: len(kv_lens)] = kv_lens
    sizes = np.diff(starts)
    num_tiles = -(-sizes // tile_members)
    group = np.repeat(np.arange(len(sizes)), sizes)  # of each member
    at = np.arange(len(members)) - starts[group]
    tile_in_group = at * num_tiles[group] // sizes[group]
    # A tile's first member is number tile * size / tiles of its group, rounded up.
    place = at + -tile_in_group * sizes[group] // num_tiles[group]
    tile = (np.cumsum(num_tiles) - num_tiles)[group] + tile_in_group
    is_shared = np.bincount(tile)[tile] > 1
    members, group, place = members[is_shared], group[is_shared], place[is_shared]
    _, tile = np.unique(tile[is_shared], return_inverse=True)
    packed[members] -= lens[group]
    packed[num_seqs + tile] = lens[group]
    packed[places_at + members] = tile * tile_members + place
    packed[members_at + tile * tile_members + place] = members
    return packed


def unpack_tiles(packed: Tensor, num_seqs: int, tile_members: int) -> SharedTiles:
    """Views of what ``pack_tiles`` has returned."""
    places_at, members_at, _ = _offsets(num_seqs, tile_members)
    num_tiles = num_seqs // 2
    members = packed[members_at : members_at + num_tiles * tile_members].view(num_tiles, tile_members)
    return SharedTiles(packed[: num_seqs + num_tiles], packed[places_at : places_at + num_seqs], members)


def aligned(size: int) -> int:
    """int32s up to where the next of several arrays in one tensor may begin: kernels are compiled for 16-byte aligned
    tensors, and compiled anew where one is not."""
    return -(-size // 4) * 4


def _offsets(num_seqs: int, tile_members: int) -> tuple[int, int, int]:
    """Where the second and third array begin, and where that ends."""
    num_tiles = num_seqs // 2
    places_at = aligned(num_seqs + num_tiles)
    members_at = places_at + aligned(num_seqs)
    return places_at, members_at, members_at + aligned(num_tiles * tile_members)
