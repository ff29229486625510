"""Fills a model with weights, each tensor straight into its place: from files, by several threads, or random ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from radixserve.engine.errors import ModelError
from radixserve.engine.layers.experts import Experts, QuantizedExperts
from radixserve.engine.layers.linear import Linear, QuantizedLinear
from radixserve.engine.layers.norm import RMSNorm
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.weight_packing import Index, columns, fits_shape, is_packed, store_packed
from radixserve.kernels.packing import WeightKind, kind_of
from radixserve.kernels.quantized import BLOCK, Form, QuantizedMatrix, quantize

Place = Tensor | QuantizedMatrix
Copy = Callable[[Tensor, Tensor], object]
"""Copies the second to the first, of the same shape."""
Progress = Callable[[str, float], None]
"""Called with (what is being done, share of it that is done, 0..1)."""

_RANDOM_STD = 0.02
_LISTED_NAMES = 8
# Buffers that some checkpoints carry although they follow from the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
_QUANTIZED_ELEMENTS = 1 << 24  # quantized at a time, so that large matrices are never in memory as fp32
_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # others: 1
_NO_WEIGHTS = ("I", "U", "BOOL", "C")  # how types of safetensors begin that are not floating-point


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix that is quantized in its file, as ``read`` gives it; ``order`` is of that matrix."""

    form: Form
    order: Tensor | None
    read: Callable[[torch.device], QuantizedMatrix]

    def merges_with(self, other: StoredMatrix | None) -> bool:
        """Whether their rows may lie in one matrix."""
        if other is None or self.form != other.form:
            return False
        return self.order is None or other.order is None or torch.equal(self.order, other.order)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. ``copy_to`` reads a part of it into a tensor of that shape, of any dtype and device
    (``reads_parts``: which takes less than all of it); ``pack_to``, if there is one, all of it into a place packed as
    ``kind``, where it loses nothing. ``read``: the tensor itself, mapped to the file, if it can be, and ``copy`` what
    takes values from there; ``matrix``: as what it is quantized, if it is."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int  # in the file
    copy_to: Callable[[Tensor, Index], None]
    kind: WeightKind = WeightKind.BF16
    pack_to: Callable[[Tensor], None] | None = None
    read: Callable[[], Tensor] | None = None
    matrix: StoredMatrix | None = None
    reads_parts: bool = True
    copy: Copy = Tensor.copy_
    number_type: str = ""  # as safetensors spells it; "" where the reader knows what it means

    def load_to(self, place: Place) -> None:
        """Read it into ``place``, packed, quantized or neither."""
        if isinstance(place, QuantizedMatrix):
            self._load_quantized(place)
        elif not is_packed(place):
            self.copy_to(place, ())
        elif self.pack_to is not None and kind_of(place, self.shape[1]) == self.kind:
            self.pack_to(place)
        else:
            store_packed(self._part_reader(), place, self.shape[1])

    def _part_reader(self) -> Callable[[Tensor, Index], object]:
        """``copy_to`` for all parts of a matrix, one after the other."""
        if self.read is not None:
            values = self.read()
        elif self.reads_parts:
            return self.copy_to
        else:
            self.copy_to(values := torch.empty(self.shape), ())
        return lambda part, index: part.copy_(values[index])

    def _load_quantized(self, place: QuantizedMatrix) -> None:
        device = place.values.device
        if self.matrix is not None:
            place.copy_(self.matrix.read(device))
            return
        assert self.read is not None, "only tensors of safetensors are quantized while they are loaded"
        values = self.read()
        step = max(1, _QUANTIZED_ELEMENTS // self.shape[1])
        for first in range(0, self.shape[0], step):
            part = self.moved(values[first : first + step], device)
            place.rows(first, len(part)).copy_(quantize(part, place.form))

    def moved(self, values: Tensor, device: torch.device) -> Tensor:
        """A part of what ``read`` gave, on ``device``."""
        if values.device == device:
            return values
        place = torch.empty(values.shape, dtype=values.dtype, device=device)
        self.copy(place, values)
        return place


def load_weights(model: nn.Module, stored: Iterable[StoredTensor], progress: Progress, num_threads: int = 1) -> None:
    """Copy every stored tensor to its place. Raises ``ModelError`` that lists what is missing, unexpected or of the
    wrong shape, before anything is copied."""
    places, tensors = match_tensors(model, stored)
    total_bytes = max(1, sum(tensor.num_bytes for tensor in tensors))
    copied_bytes, started = 0, time.monotonic()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
        copies = {threads.submit(tensor.load_to, places[tensor.name]): tensor for tensor in tensors}
        try:
            for copy in as_completed(copies):
                copy.result()
                copied_bytes += copies[copy].num_bytes
                speed = copied_bytes / max(time.monotonic() - started, 1e-6)
                what = (
                    f"loading weights: {copied_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB, {speed / 1e9:.2f} GB/s"
                )
                progress(what, copied_bytes / total_bytes)
        finally:
            threads.shutdown(cancel_futures=True)


def match_tensors(model: nn.Module, stored: Iterable[StoredTensor]) -> tuple[dict[str, Place], list[StoredTensor]]:
    """The places of ``model``, and the tensors of ``stored`` that go there. Raises as ``load_weights`` does."""
    tensors = list(stored)
    places = weight_places(model, {tensor.name for tensor in tensors})
    tensors = [tensor for tensor in tensors if tensor.name in places or not _is_redundant(tensor)]
    _check_complete(places, tensors)
    return places, tensors


def weight_places(model: nn.Module, stored: Collection[str] = ()) -> dict[str, Place]:
    """Where each tensor of a checkpoint goes: its name -> a view of what the model holds. What is merged there may be
    stored in several ways: of these, the one of which a name is in ``stored``."""
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        for kind, storage in storages(module):
            ways = _ways_to_store(path, module, kind, storage)
            places |= next((way for way in ways if not way.keys().isdisjoint(stored)), ways[0])
    return places


def safetensors_tensors(paths: Sequence[Path], spec: ModelSpec, copy: Copy = Tensor.copy_) -> Iterator[StoredTensor]:
    """All tensors of a checkpoint's shards in the order of the files, under the names of ``Decoder``. ``copy``: of the
    mapped file to a place. Raises ``ModelError`` for a file that cannot be read."""
    names = spec.stored_names
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read as safetensors (download it again): {error}") from error
        for stored_name in file.offset_keys():
            if stored_name.startswith(names.ignored):
                continue
            name = names.ours(stored_name)
            header = file.get_slice(stored_name)
            shape = tuple(header.get_shape())
            number_type = header.get_dtype()
            num_bytes = torch.Size(shape).numel() * _DTYPE_BYTES.get(number_type, 1)
            added = 1.0 if spec.unit_offset_norms and name.endswith("norm.weight") else 0.0
            read = partial(file.get_tensor, stored_name)
            copy_to = partial(_copy_safetensor, read, copy, added)
            yield StoredTensor(name, shape, num_bytes, copy_to, read=read, copy=copy, number_type=number_type)


def fill_random(model: nn.Module, seed: int) -> None:
    """Normal values of deviation 0.02 (larger ones overflow the logits), norms one; drawn on the model's device."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        for _, storage in storages(module):
            _fill_randomly(module, storage, generator)


def _fill_randomly(module: nn.Module, storage: Place, generator: torch.Generator) -> None:
    def draw(rows: int, cols: int) -> Tensor:
        return draw_random(torch.empty(rows, cols, device=generator.device), module, generator)

    if isinstance(storage, QuantizedMatrix):
        rows, cols = storage.shape
        step = BLOCK * max(1, _QUANTIZED_ELEMENTS // cols // BLOCK)  # blocks of rows that share scales stay whole
        for first in range(0, rows, step):
            part = draw(min(step, rows - first), cols)
            storage.rows(first, len(part)).copy_(quantize(part, storage.form))
    elif is_packed(storage):
        store_packed(lambda part, index: draw_random(part, module, generator), storage, columns(module))
    else:
        draw_random(storage, module, generator)


def draw_random(values: Tensor, module: nn.Module, generator: torch.Generator) -> Tensor:
    """Fill ``values`` of a parameter of ``module`` in place, see ``fill_random``."""
    if isinstance(module, RMSNorm):
        return values.fill_(1.0)
    return values.normal_(0.0, _RANDOM_STD, generator=generator)


def storages(module: nn.Module) -> Iterator[tuple[str, Place]]:
    """What holds a module's own weights, by kind."""
    match module:
        case QuantizedLinear():
            yield "weight", module.matrix
        case QuantizedExperts():
            yield "gate_up_proj", module.gate_up_proj.matrix
            yield "down_proj", module.down_proj.matrix
    yield from module.named_parameters(recurse=False)


def _ways_to_store(path: str, module: nn.Module, kind: str, storage: Place) -> list[dict[str, Place]]:
    """Complete sets of names for one storage, each with its part."""
    whole: dict[str, Place] = {f"{path}.{kind}": storage}
    match module:
        case Linear() | QuantizedLinear() if module.parts:
            parent, rows = path.rpartition(".")[0], storage.split(list(module.parts.values()))
            parts: dict[str, Place] = {
                f"{parent}.{part}.{kind}": some for part, some in zip(module.parts, rows, strict=True)
            }
            return [parts, whole]
        case Experts():
            assert isinstance(storage, Tensor)
            names = _expert_parts(kind)
            stacks = dict(zip(names, storage.chunk(len(names), dim=1), strict=True))
            stacked: dict[str, Place] = {f"{path}.{name}.weight": stack for name, stack in stacks.items()}
            single: dict[str, Place] = {
                f"{path}.{i}.{name}.weight": one for name, stack in stacks.items() for i, one in enumerate(stack)
            }
            return [single, stacked, whole]
        case QuantizedExperts():
            assert isinstance(storage, QuantizedMatrix)
            one_by_one = expert_names(path, kind, module.count)
            rows = storage.split([storage.shape[0] // len(one_by_one)] * len(one_by_one))
            return [dict(zip(one_by_one, rows, strict=True))]
    return [whole]


def expert_names(path: str, kind: str, count: int) -> list[str]:
    """Of the matrices of so many experts that are one stack in a model, in the order of its rows."""
    return [f"{path}.{expert}.{part}.weight" for expert in range(count) for part in _expert_parts(kind)]


def _expert_parts(kind: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)


def _copy_safetensor(read: Callable[[], Tensor], copy: Copy, added: float, place: Tensor, index: Index) -> None:
    """From the mapped file straight to its place: no copy of it in between."""
    copy(place, read()[index])
    if added:
        place.add_(added)


def _is_redundant(tensor: StoredTensor) -> bool:
    """Of a tensor without a place: derived buffers, the output head of a model that uses its embedding for it, and
    biases of zeros, which some quantizers add."""
    if tensor.name == "lm_head.weight" or tensor.name.endswith(_DERIVED_SUFFIXES):
        return True
    return tensor.name.endswith(".bias") and tensor.read is not None and not tensor.read().any()


def _check_complete(places: dict[str, Place], tensors: list[StoredTensor]) -> None:
    found = {tensor.name: tensor.shape for tensor in tensors}
    counts = Counter(tensor.name for tensor in tensors)
    wrong = [
        f"{name} is {list(found[name])}, not {list(place.shape)}{' packed' * is_packed(place)}"
        for name, place in places.items()
        if name in found and not fits_shape(place, found[name])
    ]
    # Integers, say, of which no configuration tells what they stand for, would be taken for the weights themselves.
    strange = [f"{t.name} is {t.number_type}" for t in tensors if t.number_type.startswith(_NO_WEIGHTS)]
    problems = [
        _listed("missing", [name for name in places if name not in found]),
        _listed("unexpected", [name for name in found if name not in places]),
        _listed("of the wrong shape", wrong),
        _listed("of no floating-point type", strange),
        # By several threads: which of them a model would have is chance.
        _listed("stored more than once", [name for name, count in counts.items() if count > 1]),
    ]
    if any(problems):
        raise ModelError("the weights do not fit the model's configuration: " + "; ".join(filter(None, problems)))


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return f"{len(names)} tensors {what} ({', '.join(names[:_LISTED_NAMES])}{more})"
