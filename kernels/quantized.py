"""Matrices of 8 and of 4 bits a weight: how they lie in memory, and how values come in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
UNIT = 32  # columns of 4 bits that lie together
GROUPS = (32, 64, 128)  # columns that may share a scale, if not a whole row does
BLOCK = 128  # rows and columns of e4m3 that share a scale, where they are multiplied with e4m3

SMALLEST_SCALE = 1e-12  # of rows that are all zero
# Tokens of a product up to which weights are widened on the way: where e4m3 can be multiplied as it is, with scales by
# row or by block, and where not. The first two follow from products of 128 tokens in parts, which were not tried with
# fewer.
_MOST_NARROW_BY_ROW, _MOST_NARROW_BY_BLOCK, _MOST_NARROW = 32, 16, 256


@dataclass(frozen=True, slots=True)
class Form:
    """``bits`` of a weight, 8 (e4m3) or 4, and how many columns of a row share a scale, one of ``GROUPS``; None: all of
    them, for 8 bits only. ``reordered``: the columns do not lie in their own order. ``height``: so many rows, from a
    multiple of it on, have the same scales."""

    bits: int
    group: int | None
    reordered: bool = False
    height: int = 1


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """[N, K] weights of value * scale, for 4 bits (value - zero) * scale. ``values``: e4m3 [N, K], or int8 [N, K / 2]:
    byte j of the 16 of a unit holds columns j (low bits) and j + 16. ``scales``: fp32 [N, groups]; ``zeros``: int8, of
    the same shape, for 4 bits only; ``order``: int64 [K], which column lies where, if reordered."""

    form: Form
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def empty(cls, form: Form, rows: int, cols: int) -> QuantizedMatrix:
        """Room for a matrix, without values, on the device of the enclosing ``torch.device`` context."""
        groups = 1 if form.group is None else cols // form.group
        scales = torch.empty(rows, groups, dtype=torch.float32)
        order = torch.empty(cols, dtype=torch.int64) if form.reordered else None
        if form.bits == 8:
            return cls(form, torch.empty(rows, cols, dtype=FP8), scales, order=order)
        values = torch.empty(rows, cols // 2, dtype=torch.int8)
        return cls(form, values, scales, torch.empty(rows, groups, dtype=torch.int8), order)

    @classmethod
    def join(cls, parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
        """The rows of all, which have the same form and order."""
        zeros = [part.zeros for part in parts if part.zeros is not None]
        values, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales"))
        return replace(parts[0], values=values, scales=scales, zeros=torch.cat(zeros) if zeros else None)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, width = self.values.shape
        return rows, width * 8 // self.form.bits

    def rows(self, first: int, count: int) -> QuantizedMatrix:
        """A view of some rows."""
        zeros = None if self.zeros is None else self.zeros.narrow(0, first, count)
        values, scales = self.values.narrow(0, first, count), self.scales.narrow(0, first, count)
        return replace(self, values=values, scales=scales, zeros=zeros)

    def split(self, sizes: Sequence[int]) -> list[QuantizedMatrix]:
        """Views of so many rows each."""
        return [self.rows(end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]

    def columns(self, first: int, count: int) -> QuantizedMatrix:
        """A view of some columns: whole groups, and none that lie in another order."""
        assert self.order is None
        bits, group = self.form.bits, self.form.group
        values = self.values.narrow(1, first * bits // 8, count * bits // 8)
        if group is None:
            return replace(self, values=values)
        assert first % group == count % group == 0
        zeros = None if self.zeros is None else self.zeros.narrow(1, first // group, count // group)
        return replace(self, values=values, scales=self.scales.narrow(1, first // group, count // group), zeros=zeros)

    def copy_(self, other: QuantizedMatrix) -> None:
        """Take over the contents of a matrix of the same form, or of one whose scales are those of more rows."""
        assert replace(other.form, height=self.form.height) == self.form and not other.form.height % self.form.height
        for name in ("values", "scales", "zeros", "order"):
            place: Tensor | None = getattr(self, name)
            if place is not None:
                place.copy_(getattr(other, name))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K], the columns in their own order; computed in fp32."""
        values = self.values.float() if self.zeros is None else unpack_nibbles(self.values).float()
        grouped = values.view(*self.scales.shape, -1)
        if self.zeros is not None:
            grouped = grouped - self.zeros[..., None]
        matrix = (grouped * self.scales[..., None]).to(dtype).view(self.shape)
        return matrix if self.order is None else torch.empty_like(matrix).index_copy_(1, self.order, matrix)


Stack = Tensor | QuantizedMatrix
"""E matrices of the same shape: [E, N, K], or quantized, all their rows as one matrix [E * N, K]."""


def matrix_of(stack: Stack, index: int, count: int) -> Tensor | QuantizedMatrix:
    """One of the ``count`` matrices of a stack."""
    if isinstance(stack, Tensor):
        return stack[index]
    rows = stack.shape[0] // count
    return stack.rows(index * rows, rows)


def quantize(values: Tensor, form: Form) -> QuantizedMatrix:
    """Round values [N, K] so that the largest of each row or group keeps its size."""
    rows, cols = values.shape
    groups = values.float().view(rows, -1, form.group or cols)
    largest = groups.abs().amax(2).clamp_min(SMALLEST_SCALE)
    if form.height > 1:
        largest = torch.cat([each.amax(0, keepdim=True).expand_as(each) for each in largest.split(form.height)])
    if form.bits == 8:
        scales = largest / FP8_MAX
        rounded = (groups / scales[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)  # some casts make larger ones NaN
        return QuantizedMatrix(form, rounded.view(rows, cols), scales)
    scales = largest / 7
    nibbles = (groups / scales[..., None]).round_().add_(8).to(torch.uint8).view(rows, cols)
    return QuantizedMatrix(form, pack_nibbles(nibbles), scales, torch.full_like(scales, 8, dtype=torch.int8))


class Product(Enum):
    """How a quantized matrix is multiplied on CUDA: by a single token, with weights that are widened on the way, on the
    units for e4m3 with activations rounded to it, or dequantized before."""

    VECTOR = "vector"
    NARROW = "narrow"
    SCALED = "scaled"
    WIDE = "wide"


def choose_product(num_tokens: int, form: Form, shape: tuple[int, int], *, has_scaled: bool) -> Product:
    """``shape``: of the matrix; ``has_scaled``: whether the device multiplies e4m3, and its library does so with scales
    of rows. As measured on an H200 with the matrices of Qwen3-8B."""
    if num_tokens == 1 and shape[1] % 32 == 0:  # 16 bytes of a row are aligned, and have a scale in common
        return Product.VECTOR
    by_row = form == Form(8, None) and not any(size % 16 for size in shape)
    is_scaled = has_scaled and (by_row or form == Form(8, BLOCK, height=BLOCK))
    most_narrow = _MOST_NARROW if not is_scaled else _MOST_NARROW_BY_ROW if by_row else _MOST_NARROW_BY_BLOCK
    if num_tokens <= most_narrow and shape[1] % 16 == 0:
        return Product.NARROW
    return Product.SCALED if is_scaled else Product.WIDE


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """uint8 [N, K] of 0..15 -> int8 [N, K / 2]."""
    low, high = nibbles.reshape(len(nibbles), -1, 2, UNIT // 2).unbind(2)
    return (low | high << 4).view(len(nibbles), -1).view(torch.int8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """int8 [N, K / 2] -> uint8 [N, K]."""
    units = packed.view(torch.uint8).view(len(packed), -1, UNIT // 2)
    return torch.stack((units & 15, units >> 4), dim=2).view(len(packed), -1)
