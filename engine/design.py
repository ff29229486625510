"""What an engine will be: the options that were "auto" resolved, and what cannot work refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixserve.configs.schema import ServeConfig
from radixserve.engine import sizing
from radixserve.engine.decoder import create_model
from radixserve.engine.errors import ConfigError
from radixserve.engine.host import usable_cores
from radixserve.engine.model_config import load_spec
from radixserve.engine.model_files import ModelFiles, resolve_model
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.profiling import make_trace_folder
from radixserve.engine.quantized_model import check_fp8, check_quantization
from radixserve.engine.sharding import Shard, local_spec
from radixserve.engine.step import Pulse
from radixserve.engine.weight_packing import can_pack_model
from radixserve.engine.weights import Progress
from radixserve.kernels.interface import Ops
from radixserve.kernels.native_ops import NativeOps
from radixserve.kernels.select import BackendUnavailable, select_native, select_ops


@dataclass(frozen=True, slots=True)
class Sizes:
    """What "auto" came to."""

    device: torch.device
    kv_dtype: torch.dtype
    max_model_len: int
    page_size: int
    step_tokens: int
    max_num_seqs: int

    @property
    def max_pages_per_row(self) -> int:
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations of layers. ``dtype``: of activations and of weights that are not packed. ``notice``: what people
    should know about the choice, if anything. ``pulse`` beats while steps run on a CPU."""

    ops: Ops
    dtype: torch.dtype
    pulse: Pulse
    notice: str = ""


@dataclass(frozen=True, slots=True)
class Design:
    """What can be known, and refused, before anything large is allocated. ``spec``: of the whole model; ``local``: of
    what the rank has of it."""

    config: ServeConfig
    shard: Shard
    files: ModelFiles
    spec: ModelSpec
    local: ModelSpec
    kernels: Kernels
    sizes: Sizes

    @classmethod
    def of(cls, config: ServeConfig, shard: Shard, progress: Progress) -> Design:
        """For the rank ``shard``. Raises ``ModelError`` and ``ConfigError``."""
        if shard.size > 1 and config.deterministic:
            raise ConfigError(
                f"deterministic does not go with tensor_parallel_size {shard.size}: the order in which ranks add up "
                "depends on the batch; use --tensor-parallel-size 1"
            )
        if config.profile is not None:
            make_trace_folder(config.profile)
        device = _resolve_device(config, shard)
        files = resolve_model(config.model, config.load_format)
        spec = load_spec(files)
        local = local_spec(spec, shard.size)
        kernels = _choose_kernels(config, spec, device, progress)
        if device.type == "cuda":
            check_fp8(config, spec, torch.cuda.get_device_capability(device))
        check_quantization(config, files, spec, is_native=isinstance(kernels.ops, NativeOps))
        return cls(config, shard, files, spec, local, kernels, _resolve_sizes(config, spec, kernels, device))


def _resolve_device(config: ServeConfig, shard: Shard) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device cuda was asked for, but torch finds no CUDA device; use --device cpu")
    if config.device == "cpu" or not has_cuda:
        torch.set_num_threads(config.cpu_threads or max(1, usable_cores() // shard.size))
        return torch.device("cpu")
    if shard.size == 1:
        return torch.device("cuda")
    if shard.size > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"tensor_parallel_size {shard.size} is more than the {count} CUDA devices that torch finds; use "
            f"--tensor-parallel-size {count} or less"
        )
    torch.cuda.set_device(shard.rank)
    return torch.device("cuda", shard.rank)


def _choose_kernels(config: ServeConfig, spec: ModelSpec, device: torch.device, progress: Progress) -> Kernels:
    notice, pulse = "", Pulse()
    if sizing.wants_native(config, config.dtype, device.type):
        try:
            if config.tensor_parallel_size > 1:
                raise BackendUnavailable("they do not go with --tensor-parallel-size")
            if config.deterministic:
                raise BackendUnavailable("their results depend on the batch, which --deterministic forbids")
            if config.attention_backend not in ("auto", "native"):
                raise BackendUnavailable(f"they do not go with --attention-backend {config.attention_backend}")
            if not can_pack_model(create_model(spec, torch.float32, torch.device("meta"), 1)):
                raise BackendUnavailable("the sizes of this model do not fit them")
            ops = select_native(torch.get_num_threads(), lambda detail: progress(detail, 0.0), pulse)
            return Kernels(ops, torch.float32, pulse, f" ({ops.description})")
        except BackendUnavailable as error:
            if config.cpu_weights in ("int4", "int8"):
                raise ConfigError(
                    f"cpu_weights {config.cpu_weights} needs the native kernels: {error}; use --cpu-weights auto"
                ) from error
            notice = f" (slow: the native kernels cannot be used: {error})"
    requested = sizing.choose_torch_dtype(config, config.dtype, device.type)
    has_native_bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    dtype = sizing.choose_dtype(requested, spec.dtype, device.type, has_native_bf16)
    layer_ops = select_ops(device, dtype, config.moe_backend, deterministic=config.deterministic, pulse=pulse)
    return Kernels(layer_ops, dtype, pulse, notice)


def _resolve_sizes(config: ServeConfig, spec: ModelSpec, kernels: Kernels, device: torch.device) -> Sizes:
    max_model_len, page_size = sizing.choose_model_len(config, spec), sizing.choose_page_size(config)
    sizing.check_num_pages(config, page_size, max_model_len)
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    if isinstance(kernels.ops, NativeOps):
        kv_dtype = sizing.choose_native_kv_dtype(config, config.dtype)
    else:
        kv_dtype = sizing.choose_kv_dtype(config, kernels.dtype)
    return Sizes(
        device=device,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        page_size=page_size,
        step_tokens=sizing.choose_step_tokens(config, device.type),
        max_num_seqs=sizing.choose_max_num_seqs(config, gpu_bytes),
    )
