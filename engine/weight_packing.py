"""Which matrices of a model are packed for the native CPU kernels, as what, and how stored tensors get there."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from radixserve.engine.layers.experts import Experts
from radixserve.engine.layers.linear import Embedding, Linear, MatrixStorage
from radixserve.kernels.packing import (
    PANEL,
    WeightKind,
    as_packed,
    can_pack,
    kind_of,
    large_page_room,
    pack,
    packed_bytes,
    row_bytes,
)
from radixserve.kernels.quantized import QuantizedMatrix

_FORCED = {"int4": WeightKind.Q4, "int8": WeightKind.Q8, "bf16": WeightKind.BF16}
_NAMES = {WeightKind.Q4: "int4", WeightKind.Q8: "int8", WeightKind.BF16: "bfloat16"}
_FORMS = {8: "fp8", 4: "int4"}  # of quantized matrices by bits
_CHUNK_ELEMENTS = 1 << 18  # packed at a time: 1 MiB of fp32, so that intermediate results stay in the cache

Index = tuple[slice, ...]
"""The part of a tensor that is wanted: a slice for each dimension, or () for all of it."""


def can_pack_model(model: nn.Module) -> bool:
    """Whether all matrices of ``model`` are of a kind and size that the kernels take."""
    if any(isinstance(module, Experts) for module in model.modules()):
        return False
    return all(_fits(module) for _, module in _matrices(model))


def pack_model(model: nn.Module, option: str, stored_kinds: Mapping[str, WeightKind]) -> None:
    """Give all matrices of ``model`` room for packed weights, without values. ``option``: ``--cpu-weights``;
    ``stored_kinds``: as what the checkpoint's tensors, by name, lose nothing."""
    matrices, shapes = _matrices(model), []
    for path, module in matrices:
        kinds = [stored_kinds.get(name, WeightKind.BF16) for name in _stored_names(path, module)]
        kind = _choose_kind(option, kinds, is_embedding=isinstance(module, Embedding) or path == "lm_head")
        shapes.append((kind, len(module.weight), columns(module)))
    sizes = [packed_bytes(*shape) for shape in shapes]
    room = large_page_room(sum(sizes), matrices[0][1].weight.device)
    for (_, module), shape, part in zip(matrices, shapes, room.split(sizes), strict=True):
        module.weight = nn.Parameter(as_packed(part, *shape), requires_grad=False)


def describe_weights(model: nn.Module) -> str:
    """The kinds of the model's matrices and the bytes of all weights, for people."""
    counts: dict[str, int] = {}
    for _, matrix in _matrices(model):
        name = str(matrix.weight.dtype).removeprefix("torch.")
        if is_packed(matrix.weight):
            name = _NAMES[kind_of(matrix.weight, columns(matrix))]
        counts[name] = counts.get(name, 0) + len(matrix.weight) * columns(matrix)
    for module in model.modules():
        if isinstance(module, MatrixStorage):
            name = _FORMS[module.matrix.form.bits]
            counts[name] = counts.get(name, 0) + math.prod(module.matrix.shape)
        elif isinstance(module, Experts):
            name = str(module.down_proj.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + sum(stack.numel() for stack in module.parameters())
    kinds = " and ".join(sorted(counts, key=lambda name: -counts[name]))
    return f"{kinds} ({model_bytes(model) / 2**30:.2f} GiB)"


def model_bytes(model: nn.Module) -> int:
    """Of all its weights."""
    return sum(tensor.numel() * tensor.itemsize for tensor in (*model.parameters(), *model.buffers()))


def is_packed(place: Tensor | QuantizedMatrix) -> bool:
    return isinstance(place, Tensor) and place.dtype == torch.uint8


def fits_shape(place: Tensor | QuantizedMatrix, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` belongs in ``place``, packed or not."""
    if isinstance(place, QuantizedMatrix) or not is_packed(place):
        return shape == tuple(place.shape)
    return len(shape) == 2 and shape[0] == len(place) and place.shape[1] in [row_bytes(k, shape[1]) for k in WeightKind]


def store_packed(read: Callable[[Tensor, Index], object], place: Tensor, cols: int) -> None:
    """Round a matrix of ``cols`` columns to what ``place`` [rows, bytes a row] is packed as. ``read`` puts a part of it
    into a tensor."""
    kind = kind_of(place, cols)
    step = max(PANEL, _CHUNK_ELEMENTS // cols // PANEL * PANEL)
    for first in range(0, len(place), step):
        count = min(step, len(place) - first)
        rows = -(-count // PANEL) * PANEL
        whole = torch.zeros(rows, cols, dtype=torch.bfloat16 if kind is WeightKind.BF16 else torch.float32)
        read(whole[:count], (slice(first, first + count), slice(None)))
        store_rows(pack(kind, whole), place, first)


def store_rows(packed: Tensor, place: Tensor, first: int) -> None:
    """Copy whole panels to rows ``first`` and following of ``place``, whose last panel has room beyond its rows."""
    room = place.as_strided(
        (len(packed), place.shape[1]), place.stride(), place.storage_offset() + first * place.stride(0)
    )
    room.copy_(packed)


def _matrices(model: nn.Module) -> list[tuple[str, Linear | Embedding]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, (Linear, Embedding))]


def _choose_kind(option: str, stored: list[WeightKind], is_embedding: bool) -> WeightKind:
    """Auto is what the checkpoint has, where parts of a matrix differ the finest. 4 bits are too few for the table that
    the logits come from."""
    kind = max(stored) if option == "auto" else _FORCED[option]
    return max(kind, WeightKind.Q8) if is_embedding and option != "auto" else kind


def _fits(module: Linear | Embedding) -> bool:
    """Rows of a part begin a panel; a vocabulary may end in the middle of one."""
    if isinstance(module, Embedding):
        return can_pack(PANEL, module.hidden_size)
    parts = list(module.parts.values()) or [len(module.weight)]
    return all(can_pack(rows, module.in_features) for rows in parts)


def columns(module: nn.Module) -> int:
    """Of the matrix of a linear layer or an embedding."""
    assert isinstance(module, (Linear, Embedding))
    return module.hidden_size if isinstance(module, Embedding) else module.in_features


def _stored_names(path: str, module: Linear | Embedding) -> Iterable[str]:
    if isinstance(module, Embedding) or not module.parts:
        return [f"{path}.weight"]
    parent = path.rpartition(".")[0]
    return [f"{parent}.{part}.weight" for part in module.parts]
