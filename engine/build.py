"""Wires an engine from its configuration: finds the device, loads the model, sizes the cache, warms up."""

import atexit
import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from radixserve.configs.schema import ServeConfig
from radixserve.engine.built import BuiltEngine
from radixserve.engine.constraint import mask_words
from radixserve.engine.decoder import CausalLM, Decoder
from radixserve.engine.design import Design
from radixserve.engine.errors import ConfigError
from radixserve.engine.grammars import XGrammars
from radixserve.engine.graphs import graph_batch_sizes, mixed_token_counts, shared_batch_sizes
from radixserve.engine.host import available_memory
from radixserve.engine.kv_scales import scale_kv
from radixserve.engine.load_model import load_model
from radixserve.engine.parallel import ParallelLogits, ParallelOps
from radixserve.engine.profiling import ProfiledRunner
from radixserve.engine.ranks import TorchRanks, check_no_group
from radixserve.engine.recorded_model import RecordedModel
from radixserve.engine.runner import ModelRunner
from radixserve.engine.sampler import Sampler
from radixserve.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from radixserve.engine.scheduler import SchedulerLimits
from radixserve.engine.sharding import Shard
from radixserve.engine.sizing import choose_num_pages, choose_overlap, choose_target_itl, cpu_kv_bytes, cuda_kv_bytes
from radixserve.engine.step import PrefillChunk, RowSetup, Runner, StepPlan
from radixserve.engine.team import OnLoss, Team, TeamRunner
from radixserve.engine.text.text_model import load_text_model
from radixserve.engine.weight_packing import describe_weights
from radixserve.engine.weights import Progress
from radixserve.kernels.interface import AttentionKernel, AttentionShape
from radixserve.kernels.native_ops import NativeAttention, NativeOps
from radixserve.kernels.packing import large_page_room
from radixserve.kernels.quantized import FP8
from radixserve.kernels.select import (
    BackendUnavailable,
    makes_sums,
    select_attention,
    select_decode_inputs,
    select_ops,
    select_sampling,
)
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.mha import KVShape, MHAKVCache
from radixserve.kvcache.naive import NaivePrefixCache
from radixserve.kvcache.radix import RadixPrefixCache

# Kernels are compiled for ranges of batch sizes: one of each, for steps that hold prompts.
_WARM_UP_TOKENS = (1, 16, 32, 64, 256)
_COMMON_RULES = SamplingParams(temperature=0.9, top_p=0.9)
_PLAIN_RULES = SamplingParams(temperature=0.9)
_LARGEST_RULES = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.1, logprobs=MAX_LOGPROBS)
# Of the description of one graph, on the device.
_GRAPH_BYTES = 2 << 20


def ignore_progress(detail: str, share: float) -> None:
    """A ``Progress`` for callers who do not show any."""


def build_engine(
    config: ServeConfig, progress: Progress = ignore_progress, on_loss: OnLoss | None = None
) -> BuiltEngine:
    """Load the model of ``config`` and everything around it; minutes for a large one, reported to ``progress``.

    With several ranks this is rank 0, which starts the others. ``on_loss``: see ``Team``; by default the next step
    raises ``EngineLost``.
    Raises ``ModelError`` and ``ConfigError`` with a remedy for what the user can change.
    """
    progress("finding the model", 0.0)
    shard = Shard(0, config.tensor_parallel_size)
    design = Design.of(config, shard, progress)
    if shard.size == 1:
        return _assemble(design, *_load(design, None, progress))
    check_no_group()
    progress("starting the other ranks", 0.0)
    ranks = _new_ranks(design)
    team = Team.start(config, on_loss or (lambda reason, status: ranks.abort()))
    with ExitStack() as undo, team.starting():
        undo.callback(ranks.leave)
        team.wait_ready()
        ranks.meet(team.meeting)
        runner, num_pages, weights = _load(design, ranks, progress)
        undo.callback(runner.release_graphs)  # ``leave``, which is called after it, waits for that
        built = _assemble(design, runner, num_pages, weights)
        undo.callback(team.close)
        undo.callback(built.close)
        close = undo.pop_all().close  # undoes once, however often it is called
    atexit.register(close)  # what is not closed would hang when torch takes itself down
    return replace(built, runner=TeamRunner(built.runner, team), close=close)


def build_follower(config: ServeConfig, shard: Shard, meeting: Path) -> Runner:
    """What rank ``shard`` executes plans with, once all ranks have come to the folder ``meeting``. All of them go the
    same way through this module, which leads through the same collectives. Raises as ``build_engine`` does."""
    design = Design.of(config, shard, ignore_progress)
    ranks = _new_ranks(design)
    (meeting / str(shard.rank)).touch()
    ranks.meet(meeting)
    return _load(design, ranks, ignore_progress)[0]


def _new_ranks(design: Design) -> TorchRanks:
    sizes, only_nccl = design.sizes, design.config.disable_custom_all_reduce
    decode_bytes = sizes.max_num_seqs * design.spec.hidden_size * design.kernels.dtype.itemsize
    return TorchRanks(design.shard, sizes.device, decode_bytes, only_nccl=only_nccl)


def _load(design: Design, ranks: TorchRanks | None, progress: Progress) -> tuple[ModelRunner, int, str]:
    """What each rank has: what runs steps, the number of its KV pages, and the weights, for people. ``ranks``: None for
    a single one."""
    config, sizes, kernels = design.config, design.sizes, design.kernels
    packing = config.cpu_weights if isinstance(kernels.ops, NativeOps) else None
    what = (config, design.files, design.spec, kernels.dtype, sizes.device, sizes.max_model_len, packing)
    model = load_model(*what, progress, design.shard)
    if sizes.kv_dtype == FP8:
        scale_kv(model)
    progress("sizing the KV cache", 1.0)
    if ranks is not None:
        design = replace(design, kernels=replace(kernels, ops=_parallel_ops(design, ranks)))
    parts = _Parts(design, model, ranks)
    num_pages = parts.choose_num_pages()
    if ranks is not None:
        num_pages = ranks.least(num_pages)
    runner = parts.runner(num_pages)
    parts.prepare(runner, progress)
    return runner, num_pages, describe_weights(model)


def _parallel_ops(design: Design, ranks: TorchRanks) -> ParallelOps:
    config, spec, kernels, device = design.config, design.spec, design.kernels, design.sizes.device
    # With a norm between product and stream nothing but whole sums is ever pending.
    norms_sum = makes_sums(device, kernels.dtype) and not spec.sandwich_norms
    ops = select_ops(device, kernels.dtype, config.moe_backend, sums=ranks) if norms_sum else kernels.ops
    return ParallelOps(ops, design.shard, ranks, norms_sum=norms_sum)


def _assemble(design: Design, runner: ModelRunner, num_pages: int, weights: str) -> BuiltEngine:
    """What only rank 0 has, around what it has loaded."""
    config, spec, sizes, kernels = design.config, design.spec, design.sizes, design.kernels
    page_size, order = sizes.page_size, config.radix_eviction_policy
    prefixes = NaivePrefixCache(page_size) if config.disable_radix_cache else RadixPrefixCache(page_size, order)
    pool_tokens = num_pages * page_size
    kv_type = " in fp8" if sizes.kv_dtype == FP8 else ""
    shorter = f", requests of up to {pool_tokens:,}" if pool_tokens < sizes.max_model_len else ""
    grammars = XGrammars(lambda: load_text_model(design.files, config).tokenizer, spec.vocab_size, spec.eos_token_ids)
    return BuiltEngine(
        runner=ProfiledRunner(runner, Path(config.profile)) if config.profile else runner,
        cache=CacheManager(prefixes, num_pages, sizes.max_num_seqs, sizes.max_pages_per_row),
        grammars=grammars,
        close=grammars.close,
        limits=SchedulerLimits(
            max_model_len=sizes.max_model_len,
            vocab_size=spec.vocab_size,
            step_tokens=sizes.step_tokens,
            eos_token_ids=spec.eos_token_ids,
            target_itl_s=choose_target_itl(config, sizes.device.type),
        ),
        overlap=choose_overlap(config, sizes.device.type),
        reads_shared=runner.reads_shared,
        pulse=kernels.pulse,
        description=(
            f"{config.model} ({spec.family}) in {weights} on {_where(design)}; "
            f"kernels: attention {runner.attention}, layers {type(kernels.ops).__name__}{kernels.notice}; "
            f"KV cache of {pool_tokens:,} tokens{kv_type} ({num_pages:,} pages of {page_size}); "
            f"context of {sizes.max_model_len:,} tokens{shorter}"
        ),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a runner is made of, but for the number of its KV pages. ``design`` has the kernels as they run."""

    design: Design
    model: Decoder
    ranks: TorchRanks | None

    @property
    def kv_shape(self) -> KVShape:
        local, sizes = self.design.local, self.design.sizes
        return KVShape(local.num_layers, sizes.page_size, local.num_kv_heads, local.head_dim, sizes.kv_dtype)

    def runner(self, num_pages: int) -> ModelRunner:
        sizes, kernels, vocab_size = self.design.sizes, self.design.kernels, self.design.spec.vocab_size
        parallel = None if self.ranks is None else ParallelLogits(self.design.shard, self.ranks, vocab_size)
        try:
            model, attention = self._with_attention()
            room = partial(large_page_room, device=sizes.device) if isinstance(kernels.ops, NativeOps) else None
            kv = MHAKVCache.allocate(self.kv_shape, num_pages, sizes.device, room)
        except (BackendUnavailable, MemoryError) as error:
            raise ConfigError(str(error)) from error
        return ModelRunner(
            model,
            kv,
            attention,
            kernels.ops,
            Sampler(sizes.max_num_seqs, vocab_size, sizes.device, select_sampling(sizes.device), parallel),
            max_rows=sizes.max_num_seqs,
            max_pages_per_row=sizes.max_pages_per_row,
        )

    def _with_attention(self) -> tuple[CausalLM, AttentionKernel]:
        """The model as it runs, and its attention."""
        config, sizes, kernels, local = self.design.config, self.design.sizes, self.design.kernels, self.design.local
        shape = AttentionShape(
            local.num_heads,
            local.num_kv_heads,
            local.head_dim,
            sizes.page_size,
            kernels.dtype if sizes.kv_dtype == FP8 else sizes.kv_dtype,
            local.attention_scale,
            local.attention_softcap,
            local.windows,
            sizes.kv_dtype,
        )
        reads_shared = config.shared_prefix_attention == "auto" and not config.disable_radix_cache
        if isinstance(kernels.ops, NativeOps):
            native = NativeAttention(shape, kernels.ops, reads_shared=reads_shared)
            return RecordedModel(self.model, kernels.ops, native, max(sizes.step_tokens, sizes.max_num_seqs)), native
        return self.model, select_attention(
            config.attention_backend,
            shape,
            sizes.device,
            sizes.max_num_seqs,
            reads_shared=reads_shared,
            deterministic=config.deterministic,
        )

    def choose_num_pages(self) -> int:
        config, sizes = self.design.config, self.design.sizes
        if config.num_pages is not None:
            return config.num_pages
        if sizes.device.type == "cpu":
            free_bytes = cpu_kv_bytes(available_memory() // self.design.shard.size)
        else:
            step_bytes = self._measure_step_bytes()
            free, total = torch.cuda.mem_get_info(sizes.device)
            free_bytes = cuda_kv_bytes(total, total - free, step_bytes, config.gpu_memory_utilization)
        most_tokens = sizes.max_num_seqs * sizes.max_model_len
        return choose_num_pages(free_bytes, self.kv_shape.page_bytes, sizes.page_size, sizes.max_model_len, most_tokens)

    def prepare(self, runner: ModelRunner, progress: Progress) -> None:
        """Load all kernels, so that no request waits for them, and capture the graphs of steps."""
        progress("warming up", 0.0)
        is_cuda = self.design.sizes.device.type == "cuda"
        for num_tokens in _WARM_UP_TOKENS if is_cuda else _WARM_UP_TOKENS[1:2]:
            self._warm_up(runner, num_tokens, 1)
        if is_cuda:
            self._warm_up(runner, 1, 1, _PLAIN_RULES, is_masked=False)
        if is_cuda and self.design.config.num_pages is not None:
            # Nothing was measured: if the largest step does not fit beside so many pages, that is known now.
            self._take_largest_step(runner)
        if self._captures(runner):
            self._capture(runner, 0, lambda share: progress("capturing graphs", share))

    def _take_largest_step(self, runner: ModelRunner) -> None:
        """With the sampling rules that take the most memory."""
        sizes = self.design.sizes
        self._warm_up(runner, sizes.step_tokens, sizes.max_num_seqs, _LARGEST_RULES)

    def _warm_up(
        self,
        runner: ModelRunner,
        num_tokens: int,
        num_rows: int,
        sampling: SamplingParams = _COMMON_RULES,
        *,
        is_masked: bool = True,
    ) -> None:
        """Run a step of ``num_tokens`` prompt tokens in ``num_rows`` sampling sequences, all on page 0, so that kernels
        are loaded, and the memory of a step of that size is known."""
        num_rows = min(num_rows, num_tokens)
        share = min(self.design.sizes.max_model_len, num_tokens // num_rows)
        ids = (np.arange(share) % self.design.spec.vocab_size).astype(np.int32)
        setups = tuple(RowSetup(row, sampling, 0, ids, share, ()) for row in range(num_rows))
        chunks = tuple(PrefillChunk(row, ids, 0, True) for row in range(num_rows))
        nothing = np.zeros(0, np.int32)
        masked = (0,) if is_masked else ()
        step = runner.launch(StepPlan(0, setups, nothing, nothing, nothing, nothing, nothing, chunks, masked=masked))
        if is_masked:
            step.sample(np.full((1, mask_words(self.design.spec.vocab_size)), -1, np.int32))
        step.result()

    def _captures(self, runner: ModelRunner) -> bool:
        # Torch's products must know on the host how many tokens an expert gets, which a graph rules out.
        config = self.design.config
        asks_device = self.design.spec.has_experts and config.moe_backend == "torch"
        return runner.can_capture and not config.enforce_eager and not asks_device

    def _capture(self, runner: ModelRunner, first: int, report: Callable[[float], None]) -> int:
        """Capture the graphs of all sizes from the ``first`` on, -1 for the largest; returns how many sizes there
        are."""
        sizes = self.design.sizes
        batch_sizes = graph_batch_sizes(sizes.max_num_seqs)
        token_counts = mixed_token_counts(sizes.step_tokens, self._sums_fit)
        decode_inputs = select_decode_inputs(sizes.device)
        assert decode_inputs is not None
        num_logits = self.design.local.vocab_size
        runner.capture(decode_inputs, batch_sizes[first:], token_counts[first:], num_logits, report)
        num_shared = len(shared_batch_sizes(batch_sizes)) if runner.reads_shared else 0
        return len(batch_sizes) + num_shared + len(token_counts)

    def _sums_fit(self, num_tokens: int) -> bool:
        """Whether a graph of so many tokens holds no sum over ranks of NCCL's."""
        hidden_size, dtype = self.design.spec.hidden_size, self.design.kernels.dtype
        stream = torch.empty(num_tokens, hidden_size, dtype=dtype, device="meta")
        return self.ranks is None or self.ranks.fits(stream)

    def _measure_step_bytes(self) -> int:
        """Peak of device memory that the largest step, the kernels' workspaces and the graphs take beside weights and
        KV."""
        device = self.design.sizes.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner = self.runner(num_pages=1)
        self._take_largest_step(runner)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        # The others share the memory of the largest.
        num_graphs = self._capture(runner, -1, lambda share: None) if self._captures(runner) else 0
        graph_bytes = free - torch.cuda.mem_get_info(device)[0] + _GRAPH_BYTES * num_graphs
        runner.release_graphs()  # which NCCL would wait for at the end
        del runner
        gc.collect()  # its parts know each other
        torch.cuda.empty_cache()
        return peak + graph_bytes


def _where(design: Design) -> str:
    device, size = design.sizes.device, design.shard.size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return name if size == 1 else f"{size} x {name}"
