"""Makes a model and fills it with weights, or says that it does not fit into memory."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from radixserve.configs.schema import ServeConfig
from radixserve.engine.cut_weights import WeightCutter
from radixserve.engine.decoder import Decoder, create_model
from radixserve.engine.errors import ConfigError
from radixserve.engine.gguf_reader import read_gguf
from radixserve.engine.gguf_weights import gguf_tensors
from radixserve.engine.host import available_memory, usable_cores
from radixserve.engine.model_files import ModelFiles
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.quantized_model import form_of, quantize_as_stored, quantize_model
from radixserve.engine.quantized_weights import quantized_tensors, unstacked
from radixserve.engine.sharding import Shard, local_spec
from radixserve.engine.staging import PinnedCopier
from radixserve.engine.weight_packing import model_bytes, pack_model
from radixserve.engine.weights import Progress, StoredTensor, fill_random, load_weights, safetensors_tensors
from radixserve.kernels.packing import WeightKind
from radixserve.kernels.quantized import Form

_MOST_THREADS = 8  # that read weights: more only make a disk seek


def load_model(
    config: ServeConfig,
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    packing: str | None,
    progress: Progress,
    shard: Shard,
) -> Decoder:
    """The part ``shard`` of the model of ``files``, whose ``spec`` this is, on ``device``; ``packing``:
    ``--cpu-weights`` for the native CPU kernels, None for others. Raises ``ConfigError`` when memory is short or the
    model cannot be cut so, ``ModelError`` when the weights do not fit the spec."""
    stored = [] if config.load_format == "dummy" else list(_stored_tensors(files, spec, device))
    if config.quantization == "fp8":
        stored = list(unstacked(stored))
    quantize = None if packing else _quantize(config, spec, stored)
    kinds = {tensor.name: tensor.kind for tensor in stored}
    local = local_spec(spec, shard.size)
    needed = weight_bytes(local, dtype, packing, kinds, quantize)
    free = available_memory() // shard.size if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:  # Linux would promise the memory, and then end the process that uses it.
        raise ConfigError(
            f"the weights take {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on {device}. Choose a "
            f"smaller model, a narrower --dtype or --cpu-weights, or a machine with more memory"
        )
    model = create_model(local, dtype, device, max_positions, quantize)
    if packing is not None:
        pack_model(model, packing, kinds)
    cutter = None
    if shard.size > 1:
        cutter = WeightCutter(create_model(spec, dtype, torch.device("meta"), max_positions=1), model, shard)
    if config.load_format == "dummy":
        cutter.fill_random(config.seed) if cutter else fill_random(model, config.seed)
        return model
    stored = list(cutter.tensors(stored)) if cutter else stored
    room = available_memory() - (needed if device.type == "cpu" else 0)
    with reading_ahead([files.gguf] if files.gguf else files.weights, room):
        load_weights(model, stored, progress, min(usable_cores(), _MOST_THREADS))
    return model


def _stored_tensors(files: ModelFiles, spec: ModelSpec, device: torch.device) -> Iterator[StoredTensor]:
    if files.gguf:
        return gguf_tensors(read_gguf(files.gguf), spec)
    copy = PinnedCopier().copy if device.type == "cuda" else Tensor.copy_
    stored = safetensors_tensors(files.weights, spec, copy)
    return quantized_tensors(stored, spec.quantization) if spec.quantization else stored


def _quantize(
    config: ServeConfig, spec: ModelSpec, stored: Sequence[StoredTensor]
) -> Callable[[nn.Module], None] | None:
    """What gives matrices of an empty model room for quantized weights."""
    if spec.quantization is not None and stored:
        return partial(quantize_as_stored, stored={tensor.name: tensor for tensor in stored})
    form = form_of(spec.quantization) if spec.quantization else Form(8, None) if config.quantization == "fp8" else None
    return None if form is None else partial(quantize_model, form=form)


def weight_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    packing: str | None = None,
    kinds: Mapping[str, WeightKind] | None = None,
    quantize: Callable[[nn.Module], None] | None = None,
) -> int:
    """Of a model in memory; ``packing`` and ``kinds``: see ``pack_model``; ``quantize``: see ``create_model``."""
    model = create_model(spec, dtype, torch.device("meta"), 1, quantize)
    if packing is not None:
        pack_model(model, packing, kinds or {})
    return model_bytes(model)


# Linux reads no more of what one call asks for than it would read ahead by itself.
_ASKED_BYTES = 128 << 10


@contextmanager
def reading_ahead(paths: Sequence[Path], free_bytes: int) -> Iterator[None]:
    """Have ``paths`` read in their order while the body runs. Not if they take more than ``free_bytes``: the kernel
    would give up what is read first before it is used."""
    if sum(path.stat().st_size for path in paths) > free_bytes:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_read_ahead, args=(paths, ended), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_ahead(paths: Sequence[Path], ended: threading.Event) -> None:
    for path in paths:
        with path.open("rb") as file:
            for start in range(0, path.stat().st_size, _ASKED_BYTES):
                if ended.is_set():
                    return
                # Returns once the disk is asked, which takes about as long as reading does when its queue is full.
                os.posix_fadvise(file.fileno(), start, _ASKED_BYTES, os.POSIX_FADV_WILLNEED)
