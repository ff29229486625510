"""A rank's part of a checkpoint: what ``sharding`` has made smaller in the rank's model is what is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from radixserve.engine.layers.experts import Experts
from radixserve.engine.layers.linear import MergedLinear
from radixserve.engine.sharding import Shard
from radixserve.engine.weights import Index, StoredTensor, draw_random, match_tensors, weight_places


class WeightCutter:
    """Knows the model ``whole`` (on "meta") and the rank's part of it, ``local``, whose weights it provides."""

    def __init__(self, whole: nn.Module, local: nn.Module, shard: Shard):
        self._whole = whole
        self._local = local
        self._shard = shard
        self._whole_sections, self._local_sections = _sections(whole), _sections(local)

    def tensors(self, stored: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
        """Those of a checkpoint, of which each reads only the rank's part. Raises ``ModelError`` as ``load_weights``
        does."""
        places, matched = match_tensors(self._whole, stored)
        local_places = weight_places(self._local, places)
        for tensor in matched:
            copy = partial(self._copy, tensor)
            yield replace(tensor, shape=tuple(local_places[tensor.name].shape), copy_to=copy, pack_to=None)

    def fill_random(self, seed: int) -> None:
        """The part of what ``weights.fill_random`` would give the whole model, drawn one whole parameter at a time."""
        device = next(self._local.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        for path, module in self._local.named_modules():
            for kind, place in module.named_parameters(recurse=False):
                shape = self._whole.get_parameter(f"{path}.{kind}").shape
                values = draw_random(torch.empty(shape, dtype=place.dtype, device=device), module, generator)
                for piece in self._pieces(f"{path}.{kind}", tuple(shape), place):
                    piece.store(partial(_copy_part, values))

    def _copy(self, tensor: StoredTensor, place: Tensor, index: Index) -> None:
        assert not index, "a tensor is cut once"
        for piece in self._pieces(tensor.name, tensor.shape, place):
            piece.store(tensor.copy_to)

    def _pieces(self, name: str, shape: tuple[int, ...], place: Tensor) -> Iterator[_Piece]:
        """``place`` of the tensor ``name``, of ``shape`` in the checkpoint, by the matrices that are merged in it."""
        dim, whole_sizes = self._whole_sections.get(name, (0, [shape[0]]))
        _, local_sizes = self._local_sections.get(name, (0, [len(place)]))
        first = 0
        for whole_size, part in zip(whole_sizes, place.split(local_sizes, dim), strict=True):
            sizes = [*shape[:dim], whole_size, *shape[dim + 1 :]]
            index = [self._shard.part(*pair) for pair in zip(sizes, part.shape, strict=True)]
            index[dim] = slice(first + index[dim].start, first + index[dim].stop)
            yield _Piece(part, tuple(index))
            first += whole_size


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a parameter and its place in the checkpoint's tensor, which ends before the part where a vocabulary
    does."""

    part: Tensor
    index: Index

    def store(self, copy_to: Callable[[Tensor, Index], None]) -> None:
        kept = self.part[tuple(slice(bounds.stop - bounds.start) for bounds in self.index)]
        if kept.shape != self.part.shape:
            self.part.zero_()
        if kept.numel():
            copy_to(kept, self.index)


def _copy_part(values: Tensor, place: Tensor, index: Index) -> None:
    place.copy_(values[index])


def _sections(model: nn.Module) -> dict[str, tuple[int, list[int]]]:
    """For each parameter that merges several matrices: along which dimension, and the size of each."""
    found: dict[str, tuple[int, list[int]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, MergedLinear):
            for kind, _ in module.named_parameters(recurse=False):
                found[f"{path}.{kind}"] = (0, list(module.parts.values()))
        elif isinstance(module, Experts):
            found[f"{path}.gate_up_proj"] = (1, [module.gate_up_proj.shape[1] // 2] * 2)
    return found
