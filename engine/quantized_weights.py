"""The matrices of quantized checkpoints, each gathered from its tensors, in the layout of ``kernels/quantized.py``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.errors import ModelError
from radixserve.engine.quantization import StoredQuantization
from radixserve.engine.weight_packing import Index, store_rows
from radixserve.engine.weights import StoredMatrix, StoredTensor, expert_names
from radixserve.kernels.packing import BLOCK, WeightKind, can_pack, pack_q4
from radixserve.kernels.quantized import FP8, GROUPS, Form, QuantizedMatrix, pack_nibbles, unpack_nibbles

# Where in an int32 of AWQ the nibbles of eight neighbouring columns lie.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Activations are scaled token by token, which is at least as fine as one scale for all, and the KV cache by our own.
_UNUSED = ("input_scale", "weight_shape", "k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")
_PACK_ROWS = 1024  # at a time
_Parts = dict[str, StoredTensor]


def quantized_tensors(stored: Iterable[StoredTensor], quantization: StoredQuantization) -> Iterator[StoredTensor]:
    """The tensors of a checkpoint with one for each matrix. Matrices that it keeps as they were stay so. Raises
    ``ModelError`` for parts that are missing or do not fit."""
    modules: dict[str, _Parts] = defaultdict(dict)
    for tensor in stored:
        path, _, part = tensor.name.rpartition(".")
        if part not in _UNUSED:
            modules[path][part] = tensor
    for path, parts in modules.items():
        match quantization.layout:
            case "fp8" if "weight" in parts and parts.keys() & {"weight_scale", "weight_scale_inv"}:
                yield _fp8(path, parts, quantization.block or (128, 128))
            case "awq" | "gptq" if "qweight" in parts:
                yield _int4(path, parts, quantization, ("qweight", "scales", "qzeros", "g_idx"))
            case "packed" if "weight_packed" in parts:
                names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
                yield _int4(path, parts, quantization, names)
        yield from parts.values()


def unstacked(stored: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Stacks of experts' matrices as one tensor for each, so that each is quantized into its rows of a model's."""
    for tensor in stored:
        if len(tensor.shape) != 3:
            yield tensor
            continue
        path, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        names = expert_names(path, kind, tensor.shape[0])
        rows, cols = tensor.shape[0] * tensor.shape[1] // len(names), tensor.shape[2]
        for index, name in enumerate(names):
            read = partial(_read_rows, tensor, index * rows, rows)
            yield StoredTensor(name, (rows, cols), tensor.num_bytes // len(names), partial(_copy_rows, read), read=read)


def _read_rows(stack: StoredTensor, first: int, count: int) -> Tensor:
    assert stack.read is not None, "only safetensors are quantized while they are loaded"
    return stack.read().flatten(0, 1).narrow(0, first, count)


def _copy_rows(read: Callable[[], Tensor], place: Tensor, index: Index) -> None:
    place.copy_(read()[index])


def _fp8(path: str, parts: _Parts, block: tuple[int, int]) -> StoredTensor:
    """Takes the tensors of the matrix out of ``parts``. Scales: one, one for each row, or one for each block."""
    weight = parts.pop("weight")
    scale = parts.pop("weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale")
    rows, cols = _matrix_shape(weight)
    count = math.prod(scale.shape)
    is_grouped = scale.shape == (-(-rows // block[0]), -(-cols // block[1])) and count > 1
    if not is_grouped and count not in (1, rows):
        raise ModelError(f"{scale.name} is {list(scale.shape)}, which does not scale a matrix of {[rows, cols]}")
    group = math.gcd(block[1], cols, GROUPS[-1]) if is_grouped else None

    def read(device: torch.device) -> QuantizedMatrix:
        values, scales = _read(weight, device), _read(scale, device).float()
        if values.dtype != FP8:
            raise ModelError(f"{weight.name} is {values.dtype}, not float8_e4m3fn as the configuration says")
        if group is None:
            scales = scales.reshape(-1, 1).expand(rows, 1)
        else:
            scales = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1] // group, 1)
            scales = scales[:, : cols // group]
        return QuantizedMatrix(Form(8, group), values, scales)

    return _stored(path, (rows, cols), [weight, scale], StoredMatrix(Form(8, group), None, read))


@dataclass(frozen=True, slots=True)
class _Int4:
    """A matrix of 4 bits in its file. ``rows``, ``cols`` and ``groups`` of the matrix, however it lies."""

    quantization: StoredQuantization
    weight: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None  # None: all are 8
    order: Tensor | None
    rows: int
    cols: int
    groups: int

    @property
    def group(self) -> int:
        """Columns that share a scale in memory: a divisor of those in the file."""
        return math.gcd(self.cols // self.groups, GROUPS[-1])

    @property
    def form(self) -> Form:
        return Form(4, self.group, reordered=self.order is not None)

    def read(self, device: torch.device) -> QuantizedMatrix:
        nibbles, zeros = self._nibbles(_read(self.weight, device)), self._zeros(device)
        scales = _read(self.scale, device).float()
        scales = scales if self.quantization.layout == "packed" else scales.t()
        order = None if self.order is None else self.order.to(device)
        if order is not None:
            nibbles = nibbles.index_select(1, order)
        repeats = self.cols // self.groups // self.group
        scales, zeros = (each.repeat_interleave(repeats, 1).contiguous() for each in (scales, zeros))
        return QuantizedMatrix(self.form, pack_nibbles(nibbles), scales, zeros, order)

    def _nibbles(self, packed: Tensor) -> Tensor:
        """uint8 [rows, cols]."""
        match self.quantization.layout:
            case "awq":
                return _eighths(packed)[..., _AWQ_ORDER].flatten(1).t()
            case "gptq":
                return _eighths(packed).permute(1, 0, 2).flatten(1)
            case _:
                return _eighths(packed).flatten(1)

    def _zeros(self, device: torch.device) -> Tensor:
        """int8 [rows, groups]."""
        if self.zero is None:
            return torch.full((self.rows, self.groups), 8, dtype=torch.int8, device=device)
        zeros = _eighths(_read(self.zero, device))
        match self.quantization.layout:
            case "awq":
                zeros = zeros[..., _AWQ_ORDER].flatten(1).t()
            case "gptq":
                zeros = zeros.flatten(1).t()
            case _:
                zeros = zeros.transpose(1, 2).flatten(0, 1)
        return zeros.to(torch.int8) + self.quantization.zero_offset


def _int4(path: str, parts: _Parts, quantization: StoredQuantization, names: tuple[str, ...]) -> StoredTensor:
    """Takes the tensors of the matrix out of ``parts``. ``names``: of weights, scales, zero points, column's groups."""
    weight, scale, zero, indices = (parts.pop(name, None) for name in names)
    if weight is None or scale is None or (zero is None and quantization.layout != "packed"):
        raise ModelError(f"{path}: {names[1]} or {names[2]} is missing beside {names[0]}; download it again")
    (a, b), is_packed = _matrix_shape(weight), quantization.layout == "packed"
    rows, groups = _matrix_shape(scale) if is_packed else _matrix_shape(scale)[::-1]
    cols = 8 * b if is_packed else a if quantization.layout == "awq" else 8 * a
    if cols % groups or (cols // groups) % GROUPS[0]:
        raise ModelError(
            f"{weight.name}: {groups} groups of {cols} columns are not of a multiple of {GROUPS[0]} columns each"
        )
    order = None if indices is None else _order(indices, cols // groups)
    matrix = _Int4(quantization, weight, scale, zero, order, rows, cols, groups)
    used = [tensor for tensor in (weight, scale, zero, indices) if tensor is not None]
    return _stored(path, (rows, cols), used, StoredMatrix(matrix.form, order, matrix.read))


def _eighths(packed: Tensor) -> Tensor:
    """int32 [R, C] -> uint8 [R, C, 8], the lowest four bits first."""
    pairs = packed.contiguous().view(torch.uint8).view(*packed.shape, 4)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(2)


def _order(indices: StoredTensor, group: int) -> Tensor | None:
    """The columns sorted by their group, where ``indices`` (the group of each column) do not count upwards."""
    groups = _read(indices, torch.device("cpu")).long()
    expected = torch.arange(len(groups)) // group
    if torch.equal(groups, expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise ModelError(f"{indices.name}: its groups are not of {group} columns each")
    return order


def _stored(path: str, shape: tuple[int, int], tensors: list[StoredTensor], matrix: StoredMatrix) -> StoredTensor:
    """One tensor instead of several. What the kernels cannot hold as it is, is dequantized when it is loaded."""
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    is_usable = matrix.form.group is None or matrix.form.group in GROUPS
    # 4 bits with a scale and a minimum are a kind of the native CPU kernels; fp8 has more values than their 8 bits.
    is_native = matrix.form.bits == 4 and matrix.order is None and can_pack(*shape)
    return StoredTensor(
        f"{path}.weight",
        shape,
        num_bytes,
        partial(_copy_dequantized, matrix),
        kind=WeightKind.Q4 if is_native else WeightKind.BF16,
        pack_to=partial(_pack, matrix) if is_native else None,
        matrix=matrix if is_usable else None,
        reads_parts=False,
    )


def _copy_dequantized(matrix: StoredMatrix, place: Tensor, index: Index) -> None:
    place.copy_(matrix.read(place.device).dequantized(place.dtype)[index])


def _pack(matrix: StoredMatrix, place: Tensor) -> None:
    """Into a place of 4 bits with scale and minimum, both rounded to fp16."""
    whole = matrix.read(torch.device("cpu"))
    for first in range(0, len(place), _PACK_ROWS):
        part = whole.rows(first, min(_PACK_ROWS, len(place) - first))
        assert part.zeros is not None
        blocks = unpack_nibbles(part.values).view(len(part.scales), -1, BLOCK)
        scales, minima = part.scales, -part.zeros * part.scales
        repeats = blocks.shape[1] // scales.shape[1]
        d, m = (each.half().numpy().repeat(repeats, 1) for each in (scales, minima))
        store_rows(torch.from_numpy(np.ascontiguousarray(pack_q4(blocks.numpy(), d, m))), place, first)


def _read(tensor: StoredTensor, device: torch.device) -> Tensor:
    assert tensor.read is not None, "only safetensors hold the parts of matrices"
    return tensor.read().to(device)


def _matrix_shape(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ModelError(f"{tensor.name} is {list(tensor.shape)}, which is no matrix")
    return tensor.shape[0], tensor.shape[1]
