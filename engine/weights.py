"""Fills a model with weights, one tensor at a time straight into its place: from files, or random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from radixserve.engine.errors import ModelError
from radixserve.engine.layers.linear import MergedLinear
from radixserve.engine.layers.norm import RMSNorm

Progress = Callable[[str, float], None]
"""Called with (what is being done, share of it that is done, 0..1)."""

_RANDOM_STD = 0.02
_LISTED_NAMES = 8
# Buffers that some checkpoints carry although they follow from the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. ``copy_to`` reads it into a tensor of its shape, of any dtype and device."""

    name: str
    shape: tuple[int, ...]
    copy_to: Callable[[Tensor], None]


def load_weights(model: nn.Module, stored: Iterable[StoredTensor], progress: Progress) -> None:
    """Copy every stored tensor to its place. Raises ``ModelError`` that lists what is missing, unexpected or of the
    wrong shape, before anything is copied."""
    places = weight_places(model)
    tensors = [tensor for tensor in stored if not _is_redundant(tensor.name, places)]
    _check_complete(places, tensors)
    total = max(1, sum(place.numel() for place in places.values()))
    copied = 0
    for tensor in tensors:
        place = places[tensor.name]
        tensor.copy_to(place)
        copied += place.numel()
        progress("loading weights", copied / total)


def weight_places(model: nn.Module) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its name -> a view of a parameter (a part of it, if that is merged)."""
    places: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, MergedLinear):
                places[f"{path}.{kind}"] = parameter
                continue
            parent = path.rpartition(".")[0]
            for part, rows in zip(module.parts, torch.split(parameter, list(module.parts.values())), strict=True):
                places[f"{parent}.{part}.{kind}"] = rows
    return places


def safetensors_tensors(paths: Sequence[Path]) -> Iterator[StoredTensor]:
    """All tensors of a checkpoint's shards. Raises ``ModelError`` for a file that cannot be read."""
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read as safetensors (download it again): {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield StoredTensor(name, tuple(file.get_slice(name).get_shape()), _safetensors_reader(file, name))


def fill_random(model: nn.Module, seed: int) -> None:
    """Normal values of deviation 0.02 (larger ones overflow the logits), norms one; drawn on the model's device."""
    generators: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
                continue
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, _RANDOM_STD, generator=generators[parameter.device])


def _safetensors_reader(file: Any, name: str) -> Callable[[Tensor], None]:
    def copy_to(place: Tensor) -> None:
        place.copy_(file.get_tensor(name))

    return copy_to


def _is_redundant(name: str, places: dict[str, Tensor]) -> bool:
    """Derived buffers, and the output head of a model that uses its embedding for it."""
    if name in places:
        return False
    return name == "lm_head.weight" or name.endswith(_DERIVED_SUFFIXES)


def _check_complete(places: dict[str, Tensor], tensors: list[StoredTensor]) -> None:
    found = {tensor.name: tensor.shape for tensor in tensors}
    wrong = [
        f"{name} is {list(found[name])}, not {list(place.shape)}"
        for name, place in places.items()
        if name in found and found[name] != tuple(place.shape)
    ]
    problems = [
        _listed("missing", [name for name in places if name not in found]),
        _listed("unexpected", [name for name in found if name not in places]),
        _listed("of the wrong shape", wrong),
    ]
    if any(problems):
        raise ModelError("the weights do not fit the model's configuration: " + "; ".join(filter(None, problems)))


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return f"{len(names)} tensors {what} ({', '.join(names[:_LISTED_NAMES])}{more})"
