"""A rank's part of a checkpoint: what ``sharding`` has made smaller in the rank's model is what is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from radixserve.engine.layers.experts import Experts, QuantizedExperts
from radixserve.engine.layers.linear import Linear, QuantizedLinear
from radixserve.engine.sharding import Shard
from radixserve.engine.weight_packing import Index
from radixserve.engine.weights import (
    Place,
    StoredMatrix,
    StoredTensor,
    draw_random,
    expert_names,
    match_tensors,
    storages,
    weight_places,
)
from radixserve.kernels.quantized import QuantizedMatrix, quantize


class WeightCutter:
    """Knows the model ``whole`` (on "meta") and the rank's part of it, ``local``, whose weights it provides."""

    def __init__(self, whole: nn.Module, local: nn.Module, shard: Shard):
        self._whole = whole
        self._local = local
        self._shard = shard
        narrow = {path for path, module in local.named_modules() if isinstance(module, QuantizedExperts)}
        self._whole_sections, self._local_sections = _sections(whole, narrow), _sections(local, narrow)

    def tensors(self, stored: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
        """Those of a checkpoint, of which each reads only the rank's part. Raises ``ModelError`` as ``load_weights``
        does."""
        places, matched = match_tensors(self._whole, stored)
        local_places = weight_places(self._local, places)
        for tensor in matched:
            shape = tuple(local_places[tensor.name].shape)
            cut = replace(tensor, shape=shape, copy_to=partial(self._copy, tensor), pack_to=None)
            if isinstance(local_places[tensor.name], QuantizedMatrix):
                pieces = list(self._pieces(tensor.name, tensor.shape, torch.empty(shape, device="meta")))
                cut = replace(cut, read=partial(_read_parts, tensor, pieces), matrix=_cut_matrix(tensor, pieces))
            yield cut

    def fill_random(self, seed: int) -> None:
        """The part of what ``weights.fill_random`` would give the whole model, drawn one whole parameter at a time."""
        device = next(self._local.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        for path, module in self._local.named_modules():
            for kind, place in storages(module):
                shape = self._whole.get_parameter(f"{path}.{kind}").shape
                dtype = place.dtype if isinstance(place, Tensor) else torch.float32
                values = draw_random(torch.empty(shape, dtype=dtype, device=device), module, generator)
                values = values.flatten(0, -2) if isinstance(place, QuantizedMatrix) else values
                for piece in self._pieces(f"{path}.{kind}", tuple(values.shape), place):
                    if isinstance(piece.part, QuantizedMatrix):
                        piece.part.copy_(quantize(values[piece.index], piece.part.form))
                    else:
                        piece.store(partial(_copy_part, values))

    def _copy(self, tensor: StoredTensor, place: Tensor, index: Index) -> None:
        assert not index, "a tensor is cut once"
        for piece in self._pieces(tensor.name, tensor.shape, place):
            piece.store(tensor.copy_to)

    def _pieces(self, name: str, shape: tuple[int, ...], place: Place) -> Iterator[_Piece]:
        """``place`` of the tensor ``name``, of ``shape`` in the checkpoint, by the matrices that are merged in it."""
        dim, whole_sizes = self._whole_sections.get(name, (0, [shape[0]]))
        _, local_sizes = self._local_sections.get(name, (0, [place.shape[0]]))
        first = 0
        parts = place.split(local_sizes, dim) if isinstance(place, Tensor) else place.split(local_sizes)
        for whole_size, part in zip(whole_sizes, parts, strict=True):
            sizes = [*shape[:dim], whole_size, *shape[dim + 1 :]]
            index = [self._shard.part(*pair) for pair in zip(sizes, part.shape, strict=True)]
            index[dim] = slice(first + index[dim].start, first + index[dim].stop)
            yield _Piece(part, tuple(index))
            first += whole_size


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a parameter and its place in the checkpoint's tensor, which ends before the part where a vocabulary
    does."""

    part: Place
    index: Index

    def store(self, copy_to: Callable[[Tensor, Index], None]) -> None:
        """Let ``copy_to`` fill what is not quantized."""
        assert isinstance(self.part, Tensor)
        kept = self.part[tuple(slice(bounds.stop - bounds.start) for bounds in self.index)]
        if kept.shape != self.part.shape:
            self.part.zero_()
        if kept.numel():
            copy_to(kept, self.index)


def _copy_part(values: Tensor, place: Tensor, index: Index) -> None:
    place.copy_(values[index])


def _read_parts(tensor: StoredTensor, pieces: list[_Piece]) -> Tensor:
    assert tensor.read is not None
    values = tensor.read()
    return torch.cat([values[piece.index] for piece in pieces])


def _cut_matrix(tensor: StoredTensor, pieces: list[_Piece]) -> StoredMatrix | None:
    """Of a quantized matrix the rows and columns of ``pieces``."""
    whole = tensor.matrix
    if whole is None:
        return None

    def read(device: torch.device) -> QuantizedMatrix:
        matrix = whole.read(device)
        return QuantizedMatrix.join([_part(matrix, *piece.index) for piece in pieces])

    return replace(whole, read=read)


def _part(matrix: QuantizedMatrix, rows: slice, columns: slice) -> QuantizedMatrix:
    part = matrix.rows(rows.start, rows.stop - rows.start)
    count = columns.stop - columns.start
    return part if count == matrix.shape[1] else part.columns(columns.start, count)


def _sections(model: nn.Module, narrow_experts: Collection[str]) -> dict[str, tuple[int, list[int]]]:
    """For each parameter that merges several matrices: along which dimension, and the size of each. The rows of all
    ``narrow_experts`` lie in one matrix."""
    found: dict[str, tuple[int, list[int]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, (Linear, QuantizedLinear)) and module.parts:
            for kind, _ in storages(module):
                found[f"{path}.{kind}"] = (0, list(module.parts.values()))
        elif path in narrow_experts:
            assert isinstance(module, (Experts, QuantizedExperts))
            for kind, stack in storages(module):
                names = expert_names(path, kind, module.count)
                found[f"{path}.{kind}"] = (0, [math.prod(stack.shape[:-1]) // len(names)] * len(names))
        elif isinstance(module, Experts):
            found[f"{path}.gate_up_proj"] = (1, [module.gate_up_proj.shape[1] // 2] * 2)
    return found
