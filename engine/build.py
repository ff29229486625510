"""Wires an engine from its configuration: finds the device, loads the model, sizes the cache, warms up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from radixserve.configs.schema import ServeConfig
from radixserve.engine.built import BuiltEngine
from radixserve.engine.errors import ConfigError
from radixserve.engine.grammars import XGrammars
from radixserve.engine.graphs import graph_batch_sizes, mixed_token_counts, shared_batch_sizes
from radixserve.engine.host import available_memory, usable_cores
from radixserve.engine.load_model import load_model
from radixserve.engine.model_config import load_spec
from radixserve.engine.model_files import resolve_model
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.models.decoder import Decoder
from radixserve.engine.models.registry import CausalLM, create_model
from radixserve.engine.profiling import ProfiledRunner
from radixserve.engine.recorded_model import RecordedModel
from radixserve.engine.runner import ModelRunner
from radixserve.engine.sampler import Sampler
from radixserve.engine.sharding import Shard
from radixserve.engine.sizing import (
    check_num_pages,
    choose_dtype,
    choose_max_num_seqs,
    choose_model_len,
    choose_native_kv_dtype,
    choose_num_pages,
    choose_overlap,
    choose_page_size,
    choose_step_tokens,
    choose_target_itl,
    cpu_kv_bytes,
    cuda_kv_bytes,
    wants_native,
)
from radixserve.engine.step import Pulse
from radixserve.engine.text.text_model import load_text_model
from radixserve.engine.warmup import warm_up
from radixserve.engine.weight_packing import can_pack_model, describe_weights
from radixserve.engine.weights import Progress
from radixserve.kernels.interface import AttentionKernel, AttentionShape, Ops
from radixserve.kernels.native_ops import NativeAttention, NativeOps
from radixserve.kernels.select import (
    BackendUnavailable,
    select_attention,
    select_decode_inputs,
    select_draw,
    select_native,
    select_ops,
)
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.mha import MHAKVCache, page_bytes
from radixserve.kvcache.naive import NaivePrefixCache
from radixserve.kvcache.radix import RadixPrefixCache

# Kernels are compiled for ranges of batch sizes: one of each, for steps that hold prompts.
_WARM_UP_TOKENS = (1, 16, 32, 64, 256)
# Of the description of one graph, on the device.
_GRAPH_BYTES = 2 << 20


def ignore_progress(detail: str, share: float) -> None:
    """A ``Progress`` for callers who do not show any."""


def build_engine(config: ServeConfig, progress: Progress = ignore_progress) -> BuiltEngine:
    """Load the model of ``config`` and everything around it; minutes for a large one, reported to ``progress``.

    Raises ``ModelError`` and ``ConfigError`` with a remedy for what the user can change.
    """
    progress("finding the model", 0.0)
    device = _resolve_device(config)
    files = resolve_model(config.model, config.load_format)
    spec = load_spec(files)
    kernels = _choose_kernels(config, spec, device, progress)
    sizes = _resolve_sizes(config, spec, kernels, device)
    packing = config.cpu_weights if isinstance(kernels.ops, NativeOps) else None
    model = load_model(config, files, spec, kernels.dtype, device, sizes.max_model_len, packing, progress, Shard())
    progress("sizing the KV cache", 1.0)
    parts = _Parts(config, spec, sizes, model, kernels)
    num_pages = parts.choose_num_pages()
    pool_tokens = num_pages * sizes.page_size
    shorter = f", requests of up to {pool_tokens:,}" if pool_tokens < sizes.max_model_len else ""
    runner = parts.runner(num_pages)
    parts.prepare(runner, progress)
    page_size, order = sizes.page_size, config.radix_eviction_policy
    prefixes = NaivePrefixCache(page_size) if config.disable_radix_cache else RadixPrefixCache(page_size, order)
    cache = CacheManager(prefixes, num_pages, sizes.max_num_seqs, sizes.max_pages_per_row)
    return BuiltEngine(
        runner=ProfiledRunner(runner, Path(config.profile)) if config.profile else runner,
        cache=cache,
        grammars=XGrammars(lambda: load_text_model(files, config).tokenizer, spec.vocab_size, spec.eos_token_ids),
        max_model_len=sizes.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_num_batched_tokens=sizes.step_tokens,
        target_itl_s=choose_target_itl(config, device.type),
        overlap=choose_overlap(config, device.type),
        reads_shared=runner.reads_shared,
        pulse=kernels.pulse,
        description=(
            f"{config.model} ({spec.family}) in {describe_weights(model)} on {_name(device)}; "
            f"kernels: {runner.kernels}{kernels.notice}; KV cache of {pool_tokens:,} tokens "
            f"({num_pages:,} pages of {sizes.page_size}); context of {sizes.max_model_len:,} tokens{shorter}"
        ),
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
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
class _Kernels:
    """The operations of layers. ``dtype``: of activations and of weights that are not packed. ``notice``: what people
    should know about the choice, if anything. ``pulse`` beats while steps run on a CPU."""

    ops: Ops
    dtype: torch.dtype
    pulse: Pulse
    notice: str = ""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a runner is made of, but for the number of its KV pages."""

    config: ServeConfig
    spec: ModelSpec
    sizes: _Sizes
    model: Decoder
    kernels: _Kernels

    def runner(self, num_pages: int) -> ModelRunner:
        spec, sizes = self.spec, self.sizes
        shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            sizes.page_size,
            sizes.kv_dtype,
            spec.attention_scale,
            spec.attention_softcap,
            spec.windows,
        )
        try:
            model, attention = self._with_attention(shape)
            kv = MHAKVCache.allocate(
                spec.num_layers,
                num_pages,
                sizes.page_size,
                spec.num_kv_heads,
                spec.head_dim,
                sizes.kv_dtype,
                sizes.device,
            )
        except (BackendUnavailable, MemoryError) as error:
            raise ConfigError(str(error)) from error
        return ModelRunner(
            model,
            kv,
            attention,
            self.kernels.ops,
            Sampler(sizes.max_num_seqs, spec.vocab_size, sizes.device, select_draw(sizes.device)),
            max_rows=sizes.max_num_seqs,
            max_pages_per_row=sizes.max_pages_per_row,
            pulse=self.kernels.pulse,
        )

    def _with_attention(self, shape: AttentionShape) -> tuple[CausalLM, AttentionKernel]:
        """The model as it runs, and its attention."""
        config, ops = self.config, self.kernels.ops
        if not isinstance(ops, NativeOps):
            return self.model, select_attention(
                config.attention_backend,
                shape,
                self.sizes.device,
                self.sizes.max_num_seqs,
                reads_shared=config.shared_prefix_attention == "auto" and not config.disable_radix_cache,
                deterministic=config.deterministic,
            )
        native = NativeAttention(shape, ops)
        return RecordedModel(self.model, ops, native, max(self.sizes.step_tokens, self.sizes.max_num_seqs)), native

    def choose_num_pages(self) -> int:
        spec, sizes, config = self.spec, self.sizes, self.config
        if config.num_pages is not None:
            return config.num_pages
        if sizes.device.type == "cpu":
            free_bytes = cpu_kv_bytes(available_memory())
        else:
            step_bytes = self._measure_step_bytes()
            free, total = torch.cuda.mem_get_info(sizes.device)
            free_bytes = cuda_kv_bytes(total, total - free, step_bytes, config.gpu_memory_utilization)
        return choose_num_pages(
            free_bytes,
            page_bytes(spec.num_layers, sizes.page_size, spec.num_kv_heads, spec.head_dim, sizes.kv_dtype),
            sizes.page_size,
            sizes.max_model_len,
            sizes.max_num_seqs * sizes.max_model_len,
        )

    def prepare(self, runner: ModelRunner, progress: Progress) -> None:
        """Load all kernels, so that no request waits for them, and capture the graphs of steps."""
        progress("warming up", 0.0)
        counts = _WARM_UP_TOKENS if self.sizes.device.type == "cuda" else _WARM_UP_TOKENS[1:2]
        for num_tokens in counts:
            warm_up(runner, num_tokens, 1, self.sizes.max_model_len, self.spec.vocab_size)
        if self._captures(runner):
            self._capture(runner, 0, lambda share: progress("capturing graphs", share))

    def _captures(self, runner: ModelRunner) -> bool:
        # How many tokens an expert gets must be known on the host, which a graph rules out.
        return runner.can_capture and not self.config.enforce_eager and not self.spec.has_experts

    def _capture(self, runner: ModelRunner, first: int, report: Callable[[float], None]) -> int:
        """Capture the graphs of all sizes from the ``first`` on, -1 for the largest; returns how many sizes there
        are."""
        batch_sizes, token_counts = (
            graph_batch_sizes(self.sizes.max_num_seqs),
            mixed_token_counts(self.sizes.step_tokens),
        )
        decode_inputs = select_decode_inputs(self.sizes.device)
        assert decode_inputs is not None
        runner.capture(decode_inputs, batch_sizes[first:], token_counts[first:], self.spec.vocab_size, report)
        num_shared = len(shared_batch_sizes(batch_sizes)) if runner.reads_shared else 0
        return len(batch_sizes) + num_shared + len(token_counts)

    def _measure_step_bytes(self) -> int:
        """Peak of device memory that the largest step, the kernels' workspaces and the graphs take beside weights and
        KV."""
        device = self.sizes.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner = self.runner(num_pages=1)
        warm_up(runner, self.sizes.step_tokens, self.sizes.max_num_seqs, self.sizes.max_model_len, self.spec.vocab_size)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        # The others share the memory of the largest.
        num_graphs = self._capture(runner, -1, lambda share: None) if self._captures(runner) else 0
        graph_bytes = free - torch.cuda.mem_get_info(device)[0] + _GRAPH_BYTES * num_graphs
        del runner
        gc.collect()  # a runner and its graphs know each other
        torch.cuda.empty_cache()
        return peak + graph_bytes


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _resolve_device(config: ServeConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device cuda was asked for, but torch finds no CUDA device; use --device cpu")
    if config.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size above 1 is not supported; use --tensor-parallel-size 1")
    if config.device == "cuda" or (config.device == "auto" and has_cuda):
        return torch.device("cuda")
    torch.set_num_threads(config.cpu_threads or usable_cores())
    return torch.device("cpu")


def _choose_kernels(config: ServeConfig, spec: ModelSpec, device: torch.device, progress: Progress) -> _Kernels:
    notice, pulse = "", Pulse()
    if wants_native(config, config.dtype, device.type):
        try:
            if config.deterministic:
                raise BackendUnavailable("their results depend on the batch, which --deterministic forbids")
            if config.attention_backend not in ("auto", "native"):
                raise BackendUnavailable(f"they do not go with --attention-backend {config.attention_backend}")
            if not can_pack_model(create_model(spec, torch.float32, torch.device("meta"), 1)):
                raise BackendUnavailable("the sizes of this model do not fit them")
            ops = select_native(torch.get_num_threads(), lambda detail: progress(detail, 0.0), pulse)
            return _Kernels(ops, torch.float32, pulse, f" ({ops.description})")
        except BackendUnavailable as error:
            if config.cpu_weights in ("int4", "int8"):
                raise ConfigError(f"cpu_weights {config.cpu_weights} needs the native kernels: {error}") from error
            notice = f" (slow: the native kernels cannot be used: {error})"
    requested = {"fp32": "float32", "bf16": "bfloat16"}.get(config.cpu_weights, config.dtype)
    has_native_bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    dtype = choose_dtype(requested, spec.dtype, device.type, has_native_bf16)
    return _Kernels(select_ops(device, dtype, deterministic=config.deterministic), dtype, pulse, notice)


def _resolve_sizes(config: ServeConfig, spec: ModelSpec, kernels: _Kernels, device: torch.device) -> _Sizes:
    is_native = isinstance(kernels.ops, NativeOps)
    max_model_len, page_size = choose_model_len(config, spec), choose_page_size(config)
    check_num_pages(config, page_size, max_model_len)
    return _Sizes(
        device=device,
        kv_dtype=choose_native_kv_dtype(config.dtype) if is_native else kernels.dtype,
        max_model_len=max_model_len,
        page_size=page_size,
        step_tokens=choose_step_tokens(config, device.type),
        max_num_seqs=choose_max_num_seqs(config, device.type),
    )
