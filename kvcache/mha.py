"""The KV buffer of multi-head and grouped-query attention, and how many pages fit. The only torch in kvcache.

Shapes: L layers, P pages, S page_size, H kv_heads, D head_dim, T tokens of a step. A slot is page * S + offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class KVShape(NamedTuple):
    """What keys and values of a page are; ``num_kv_heads`` are those of one device."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V that one page takes, all layers together."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def pages_that_fit(free_bytes: int, page_bytes: int) -> int:
    """Pages that ``free_bytes`` have room for; 0 when more is in use than there is."""
    return max(free_bytes, 0) // page_bytes


class MHAKVCache:
    """Owns the keys and values of all pages: one buffer [2, L, P, S, H, D] on one device, of which at least the last
    three dimensions lie together. Which page is whose is the business of the cache manager."""

    def __init__(self, buffer: Tensor):
        assert buffer.dim() == 6 and buffer.size(0) == 2 and buffer[0, 0, 0].is_contiguous()
        self.buffer = buffer

    @classmethod
    def allocate(
        cls, shape: KVShape, num_pages: int, device: torch.device, room: Callable[[int], Tensor] | None = None
    ) -> MHAKVCache:
        """Make the buffer. MemoryError, saying what to lower, when the device has no room for it.

        ``room``: gives so many bytes, uint8, that become a buffer in which all of a page lies together, so that few
        tokens take little memory even where the system gives it by megabytes. Without it layers lie apart.
        On the CPU nothing is written to it, so memory is taken from the system only as pages come into use. On other
        devices it is zeroed: a kernel that loads a half-filled page whole must not meet a NaN there.
        """
        num_layers, page_size, num_kv_heads, head_dim, dtype = shape
        page = (page_size, num_kv_heads, head_dim)
        make = torch.empty if device.type == "cpu" else torch.zeros
        try:
            if room is not None:
                by_page = room(num_pages * shape.page_bytes).view(dtype).view(num_pages, num_layers, 2, *page)
                return cls(by_page.permute(2, 1, 0, 3, 4, 5))
            return cls(make((2, num_layers, num_pages, *page), dtype=dtype, device=device))
        except (RuntimeError, OSError, OverflowError) as error:  # torch's out-of-memory errors are RuntimeErrors
            gib = num_pages * shape.page_bytes / 2**30
            raise MemoryError(
                f"{num_pages} KV pages of {page_size} tokens take {gib:.1f} GiB, which {device} does not have free: "
                f"lower --num-pages or --gpu-memory-utilization, or end what else uses the memory"
            ) from error

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each a view [P, S, H, D]."""
        return self.buffer[0, index], self.buffer[1, index]

    def store_kv(self, k: Tensor, v: Tensor, slots: Tensor, layer: int) -> None:
        """Scatter k and v [T, H, D] of one layer to ``slots`` int64 [T], each at least 0 and named once. (Models do so
        in the kernel that rotates the keys, see ``kernels/interface.py``; this says what that means.)"""
        page_size = self.buffer.shape[3]
        for cache, new in zip(self.layer(layer), (k, v), strict=True):
            cache[slots // page_size, slots % page_size] = new
