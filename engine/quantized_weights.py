"""The matrices of quantized checkpoints, each gathered from its tensors, in the layout of ``kernels/quantized.py``."""

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
from radixserve.engine.weights import Copy, StoredMatrix, StoredTensor, expert_names
from radixserve.kernels import packing
from radixserve.kernels.packing import WeightKind, can_pack, pack_q4
from radixserve.kernels.quantized import BLOCK, FP8, GROUPS, Form, QuantizedMatrix, pack_nibbles, unpack_nibbles

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
            case layout if layout in _LAYOUTS and _LAYOUTS[layout].names[0] in parts:
                yield _int4(path, parts, quantization)
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
            copy_to, num_bytes = partial(_copy, read, tensor.copy), tensor.num_bytes // len(names)
            yield StoredTensor(name, (rows, cols), num_bytes, copy_to, read=read, copy=tensor.copy)


def _read_rows(stack: StoredTensor, first: int, count: int) -> Tensor:
    assert stack.read is not None, "only safetensors are quantized while they are loaded"
    return stack.read().flatten(0, 1).narrow(0, first, count)


def _copy(read: Callable[[], Tensor], copy: Copy, place: Tensor, index: Index) -> None:
    copy(place, read()[index])


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
    form = Form(8, group, height=BLOCK if is_grouped and group == BLOCK and block[0] % BLOCK == 0 else 1)

    def read(device: torch.device) -> QuantizedMatrix:
        values, scales = _read(weight, device), _read(scale, device).float()
        if values.dtype != FP8:
            raise ModelError(f"{weight.name} is {values.dtype}, not float8_e4m3fn as the configuration says")
        if group is None:
            scales = scales.reshape(-1, 1).expand(rows, 1)
        else:
            scales = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1] // group, 1)
            scales = scales[:, : cols // group]
        return QuantizedMatrix(form, values, scales)

    return _stored(path, (rows, cols), [weight, scale], StoredMatrix(form, None, read))


@dataclass(frozen=True, slots=True)
class _Layout:
    """How 4 bits lie: the ``names`` of weights, scales, zero points and columns' groups; ``weights`` and ``zeros`` make
    uint8 [rows, cols] and [rows, groups] of int32; ``cols`` of the shape of the weights' int32."""

    names: tuple[str, str, str, str]
    weights: Callable[[Tensor], Tensor]
    zeros: Callable[[Tensor], Tensor]
    cols: Callable[[int, int], int]


def _eighths(packed: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [R, C] -> uint8 [R, 8 C], the lowest four bits first, if not in another ``order``."""
    pairs = packed.contiguous().view(torch.uint8).view(*packed.shape, 4)
    nibbles = torch.stack((pairs & 15, pairs >> 4), -1).flatten(2)
    return (nibbles if order is None else nibbles[..., order]).flatten(1)


_NAMES = ("qweight", "scales", "qzeros", "g_idx")
_LAYOUTS = {
    "awq": _Layout(
        _NAMES, lambda w: _eighths(w, _AWQ_ORDER).t(), lambda z: _eighths(z, _AWQ_ORDER).t(), lambda a, b: a
    ),
    "gptq": _Layout(_NAMES, lambda w: _eighths(w.t()), lambda z: _eighths(z).t(), lambda a, b: 8 * a),
    "packed": _Layout(
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        _eighths,
        lambda z: _eighths(z.t()).t(),
        lambda a, b: 8 * b,
    ),
}


def _int4(path: str, parts: _Parts, quantization: StoredQuantization) -> StoredTensor:
    """Takes the tensors of the matrix out of ``parts``. Without zero points all are 8."""
    layout, is_packed = _LAYOUTS[quantization.layout], quantization.layout == "packed"
    weight, scale, zero, indices = (parts.pop(name, None) for name in layout.names)
    if weight is None or scale is None or (zero is None and not is_packed):
        first, second, third, _ = layout.names
        raise ModelError(f"{path}: {second} or {third} is missing beside {first}; download it again")
    rows, groups = _matrix_shape(scale) if is_packed else _matrix_shape(scale)[::-1]
    cols = layout.cols(*_matrix_shape(weight))
    if cols % groups or (cols // groups) % GROUPS[0]:
        raise ModelError(
            f"{weight.name}: {groups} groups of {cols} columns are not of a multiple of {GROUPS[0]} columns each"
        )
    order = None if indices is None else _order(indices, cols // groups)
    group = math.gcd(cols // groups, GROUPS[-1])  # a divisor of that in the file
    form = Form(4, group, reordered=order is not None)

    def read(device: torch.device) -> QuantizedMatrix:
        nibbles, scales = layout.weights(_read(weight, device)), _read(scale, device).float()
        scales = scales if is_packed else scales.t()
        zeros = torch.full_like(scales, 8) if zero is None else layout.zeros(_read(zero, device))
        zeros = zeros.to(torch.int8) + quantization.zero_offset
        own_order = None if order is None else order.to(device)
        if own_order is not None:
            nibbles = nibbles.index_select(1, own_order)
        repeats = cols // groups // group
        scales, zeros = (each.repeat_interleave(repeats, 1).contiguous() for each in (scales, zeros))
        return QuantizedMatrix(form, pack_nibbles(nibbles), scales, zeros, own_order)

    used = [tensor for tensor in (weight, scale, zero, indices) if tensor is not None]
    return _stored(path, (rows, cols), used, StoredMatrix(form, order, read))


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
        blocks = unpack_nibbles(part.values).view(len(part.scales), -1, packing.BLOCK)
        repeats = blocks.shape[1] // part.scales.shape[1]
        d, m = (each.half().numpy().repeat(repeats, 1) for each in (part.scales, -part.zeros * part.scales))
        store_rows(torch.from_numpy(np.ascontiguousarray(pack_q4(blocks.numpy(), d, m))), place, first)


def _read(tensor: StoredTensor, device: torch.device) -> Tensor:
    assert tensor.read is not None, "only safetensors hold the parts of matrices"
    return tensor.moved(tensor.read(), device)


def _matrix_shape(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ModelError(f"{tensor.name} is {list(tensor.shape)}, which is no matrix")
    return tensor.shape[0], tensor.shape[1]
