"""Makes a model and fills it with weights, or says that it does not fit into memory."""

from __future__ import annotations

import torch

from radixserve.configs.schema import ServeConfig
from radixserve.engine.errors import ConfigError
from radixserve.engine.gguf_reader import read_gguf
from radixserve.engine.gguf_weights import gguf_tensors
from radixserve.engine.host import available_memory, usable_cores
from radixserve.engine.model_files import ModelFiles
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.models.decoder import Decoder
from radixserve.engine.models.registry import create_model
from radixserve.engine.weights import Progress, fill_random, load_weights, safetensors_tensors

_MOST_THREADS = 8  # that read weights: more only make a disk seek


def load_model(
    config: ServeConfig,
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    progress: Progress,
) -> Decoder:
    """The model of ``files`` on ``device``. Raises ``ConfigError`` when memory is short, ``ModelError`` when the
    weights do not fit the spec."""
    needed = weight_bytes(spec, dtype)
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:  # Linux would promise the memory, and then end the process that uses it.
        raise ConfigError(
            f"the weights take {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on {device}. Choose a "
            f"smaller model, a narrower --dtype or a machine with more memory"
        )
    model = create_model(spec, dtype, device, max_positions)
    if config.load_format == "dummy":
        fill_random(model, config.seed)
        return model
    stored = gguf_tensors(read_gguf(files.gguf), spec) if files.gguf else safetensors_tensors(files.weights, spec)
    load_weights(model, stored, progress, min(usable_cores(), _MOST_THREADS))
    return model


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Of a model in memory."""
    model = create_model(spec, dtype, torch.device("meta"), max_positions=1)
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
