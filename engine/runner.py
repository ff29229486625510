"""Executes step plans: one forward pass over paged KV, then sampling. Implements ``step.Runner``.

``launch`` only enqueues work: it never waits for the device, so on CUDA the next plan can be made meanwhile. There a
step of decodes alone is the replay of a graph, sampling included, and so is one with a moderate number of prompt
tokens, up to its final hidden states. All other steps, and all steps on a CPU, run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.decoder import CausalLM
from radixserve.engine.graphs import DecodeGraphs, MixedGraphs, shared_batch_sizes
from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.logprobs import PromptLogprobs, ScoredChunk
from radixserve.engine.lost_device import noticing_loss
from radixserve.engine.messages import TokenLogprobs
from radixserve.engine.sampler import SampleBatch, Sampled, Sampler, TokenMasks
from radixserve.engine.step import Int32s, StepPlan, StepResult
from radixserve.engine.step_inputs import PaddedSize, PageTable, StepInputs, lay_out, upload
from radixserve.engine.transfer import record_event
from radixserve.kernels.interface import AttentionKernel, BatchLayout, DecodeInputs, Ops
from radixserve.kernels.shared_prefix import PrefixGroups, SharedTiles, pack_tiles, unpack_tiles
from radixserve.kvcache.mha import MHAKVCache

# Enqueues the sampling of a step, whose logits are computed then. The masks are those of ``StepPlan.masked``.
Draw = Callable[[TokenMasks | None], Sampled]

_NOTHING: Int32s = np.zeros(0, np.int32)


class ModelRunner:
    """Owns the weights, the KV buffer, the page table, the sampler and the graphs of steps. Plans run in launch order
    on the current stream."""

    def __init__(
        self,
        model: CausalLM,
        kv: MHAKVCache,
        attention: AttentionKernel,
        ops: Ops,
        sampler: Sampler,
        *,
        max_rows: int,
        max_pages_per_row: int,
    ):
        self._model = model
        self._attention = attention
        self._ops = ops
        self._sampler = sampler
        self._prompt_logprobs = PromptLogprobs(lambda hidden: sampler.whole(model.logits(hidden, ops)))
        self._device = kv.buffer.device
        self._page_size = kv.buffer.shape[3]
        self._k_caches, self._v_caches = kv.buffer[0].unbind(0), kv.buffer[1].unbind(0)
        self._page_table = PageTable(max_rows, max_pages_per_row, self._device)
        self._decode_graphs: DecodeGraphs | None = None
        self._shared_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._graph_logits = torch.empty(0, device=self._device)

    @property
    def attention(self) -> str:
        """Which kernel was chosen, for people."""
        return type(self._attention).__name__

    @property
    def can_capture(self) -> bool:
        """Whether steps can be captured in graphs."""
        return self._device.type == "cuda" and self._attention.plans_on_device

    @property
    def reads_shared(self) -> bool:
        """Whether plans should say which decodes share a prefix."""
        return self._attention.shared_prefixes is not None

    @torch.inference_mode()
    def capture(
        self,
        decode_inputs: DecodeInputs,
        batch_sizes: Sequence[int],
        token_counts: Sequence[int],
        num_logits: int,
        report: Callable[[float], None],
    ) -> None:
        """From now on replay CUDA graphs for steps of up to max(``batch_sizes``) decodes and nothing else, and for most
        others of up to max(``token_counts``) tokens. Only if ``can_capture``. ``num_logits``: of the model for a token.
        ``report``: share done."""
        self._graph_logits = torch.empty(max(batch_sizes), num_logits, device=self._device)

        def decode(rows: Tensor, kv_lens: Tensor, shared: SharedTiles | None) -> Tensor:
            table = self._page_table.tensor
            inputs = decode_inputs(rows, kv_lens, table, self._sampler.last_tokens, self._page_size)
            starts = torch.empty(0, dtype=torch.int32, device=self._device)
            nothing = (_NOTHING, _NOTHING, _NOTHING)
            self._attention.plan(self._layout(len(rows), (rows, kv_lens, starts), nothing, shared))
            ids, positions, slots = inputs
            hidden = self._model(ids, self._context(positions, slots))
            logits = self._model.logits(hidden, self._ops, self._graph_logits[: len(rows)])
            return self._sampler.draw_plain(logits, rows, kv_lens)

        def mixed(inputs: StepInputs[Tensor], size: PaddedSize) -> Tensor:
            return self._forward(self._layout_of(inputs, size.decodes), inputs)

        pool = torch.cuda.graph_pool_handle()
        padding_row = len(self._page_table.host)
        rule = self._attention.shared_prefixes
        members = None if rule is None else rule.tile_members
        mixed_graphs = MixedGraphs(mixed, token_counts, padding_row, self._device, members)
        decode_graphs = DecodeGraphs(decode, batch_sizes, padding_row, self._device)
        # The larger ones first: the others then fit into their memory.
        mixed_graphs.capture(pool, lambda share: report(share / 3))
        decode_graphs.capture(pool, lambda share: report((1 + share) / 3))
        self._mixed_graphs, self._decode_graphs = mixed_graphs, decode_graphs
        if members is not None:
            sizes = shared_batch_sizes(batch_sizes)
            self._shared_graphs = DecodeGraphs(decode, sizes, padding_row, self._device, members)
            self._shared_graphs.capture(pool, lambda share: report((2 + share) / 3))

    def release_graphs(self) -> None:
        """Destroy the graphs, although somebody may still know this runner. Nothing can be launched any more."""
        for graphs in (self._decode_graphs, self._shared_graphs, self._mixed_graphs):
            if graphs is not None:
                graphs.release()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue ``plan``, which has at least one token. Raises ``EngineLost`` when the device answers no more."""
        with noticing_loss(self._device):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self._sampler.set_rows(plan.setups)
        for setup in plan.setups:
            self._prompt_logprobs.set_row(setup.row, setup.sampling.prompt_logprobs)
        self._page_table.write(plan.page_rows, plan.page_cols, plan.page_ids)
        num_decodes = len(plan.decode_rows)
        groups = self._groups_to_read_once(plan)
        decode_graphs = self._decode_graphs if groups is None else self._shared_graphs
        if decode_graphs is not None and not plan.chunks and decode_graphs.fits(num_decodes):
            return self._launched(plan, self._replay(decode_graphs, plan, groups))
        host = lay_out(plan, self._page_table.host, self._page_size)
        if self._mixed_graphs is not None and plan.chunks and self._mixed_graphs.fits(plan):
            inputs, hidden = self._mixed_graphs.replay(host, num_decodes, groups)
        else:
            host = self._with_tiles(host, num_decodes, groups)
            inputs = upload(host, self._device)
            hidden = self._forward(self._layout_of(inputs, num_decodes, host), inputs)
        hidden = hidden[: plan.num_tokens]
        scored = self._prompt_logprobs.score(plan.chunks, hidden[num_decodes:])
        draw = self._draw(hidden, host, inputs) if len(host.sample_rows) else None
        return self._launched(plan, draw, scored)

    def _launched(self, plan: StepPlan, draw: Draw | None, scored: Sequence[ScoredChunk] = ()) -> LaunchedStep:
        step = LaunchedStep(draw, plan, scored, self._device)
        if not plan.masked:
            step.draw(None)
        return step

    def _groups_to_read_once(self, plan: StepPlan) -> PrefixGroups | None:
        """The plan's shared prefixes, if reading them once pays (see ``SharedPrefixRule``)."""
        rule, shared = self._attention.shared_prefixes, plan.shared
        if rule is None or shared is None or not len(shared.members):
            return None
        groups = PrefixGroups(shared.members, shared.starts, shared.num_pages * self._page_size)
        return groups if rule.pays(groups, int(plan.decode_lens.sum())) else None

    def _with_tiles(
        self, host: StepInputs[Int32s], num_decodes: int, groups: PrefixGroups | None
    ) -> StepInputs[Int32s]:
        rule = self._attention.shared_prefixes
        if rule is None or groups is None:
            return host
        return host._replace(tiles=pack_tiles(groups, host.kv_lens[:num_decodes], num_decodes, rule.tile_members))

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan, groups: PrefixGroups | None) -> Draw:
        rows, kv_lens = plan.decode_rows, plan.decode_lens
        drawn = graphs.replay(rows, kv_lens, groups)
        if not plan.masked and self._sampler.are_plain(rows, kv_lens):
            return lambda masks: Sampled(drawn)
        # Somebody wants more: sample all of them again from the logits that the graph has left behind.
        batch = SampleBatch(*graphs.inputs(len(rows)), rows, kv_lens)
        return partial(self._sampler.sample, self._graph_logits[: len(rows)], batch)

    def _layout_of(
        self, inputs: StepInputs[Tensor], num_decodes: int, host: StepInputs[Int32s] | None = None
    ) -> BatchLayout:
        """Without ``host`` attention is planned on the device."""
        rule, tiles = self._attention.shared_prefixes, None
        if rule is not None and len(inputs.tiles):
            tiles = unpack_tiles(inputs.tiles, num_decodes, rule.tile_members)
        sequences = (inputs.rows, inputs.kv_lens, inputs.query_starts)
        on_host = (host.rows, host.kv_lens, host.query_starts) if host else (_NOTHING, _NOTHING, _NOTHING)
        return self._layout(num_decodes, sequences, on_host, tiles)

    def _layout(
        self,
        num_decodes: int,
        sequences: tuple[Tensor, Tensor, Tensor],
        on_host: tuple[Int32s, Int32s, Int32s],
        shared: SharedTiles | None,
    ) -> BatchLayout:
        """``sequences``: rows, KV lengths and query starts."""
        table = self._page_table
        return BatchLayout(num_decodes, self._page_size, *sequences, table.tensor, *on_host, table.host, shared)

    def _forward(self, layout: BatchLayout, inputs: StepInputs[Tensor]) -> Tensor:
        """Final hidden states [T, H]."""
        self._attention.plan(layout)
        last_tokens = self._sampler.last_tokens[(-1 - inputs.ids).clamp(min=0)]
        ids = torch.where(inputs.ids < 0, last_tokens, inputs.ids)
        return self._model(ids, self._context(inputs.positions, inputs.slots.long()))

    def _context(self, positions: Tensor, slots: Tensor) -> ForwardContext:
        caches = (self._k_caches, self._v_caches)
        return ForwardContext(self._ops, self._attention, positions, slots, *caches)

    def _draw(self, hidden: Tensor, host: StepInputs[Int32s], inputs: StepInputs[Tensor]) -> Draw:
        """How to sample for the sequences that want it; ``inputs`` may be padded."""
        count = len(host.sample_rows)
        everywhere = count == len(hidden)
        logits = self._model.logits(hidden if everywhere else hidden[inputs.sample_tokens[:count]], self._ops)
        rows, num_known = inputs.sample_rows[:count], inputs.sample_lens[:count]
        return partial(self._sampler.sample, logits, SampleBatch(rows, num_known, host.sample_rows, host.sample_lens))


class LaunchedStep:
    """A ``PendingStep`` whose results are on their way to the host once ``draw`` or ``sample`` was called. The function
    ``draw`` gives ``plan.num_samples`` tokens or more; None if the plan samples nothing."""

    def __init__(self, draw: Draw | None, plan: StepPlan, scored: Sequence[ScoredChunk], device: torch.device):
        self._draw = draw
        self._plan = plan
        self._num_samples = plan.num_samples
        self._scored = [chunk.to_host() for chunk in scored]
        self._device = device

    @torch.inference_mode()
    def sample(self, masks: Int32s) -> None:
        with noticing_loss(self._device):
            self.draw(TokenMasks(np.array(self._plan.masked, np.intp), masks))

    def draw(self, masks: TokenMasks | None) -> None:
        self._sampled = self._draw(masks).to_host() if self._draw else None
        self._done = record_event(self._device)

    def result(self) -> StepResult:
        if self._done is not None:
            with noticing_loss(self._device):
                self._done.synchronize()
        prompt_logprobs = {chunk.row: chunk.messages() for chunk in self._scored} or None
        if self._sampled is None:
            return StepResult(_NOTHING, np.zeros(0, np.bool_), prompt_logprobs=prompt_logprobs)
        tokens, failed = self._sampled.drawn.numpy()[:, : self._num_samples]
        return StepResult(tokens, failed.astype(np.bool_), self._logprobs(), prompt_logprobs)

    def _logprobs(self) -> list[TokenLogprobs | None] | None:
        assert self._sampled is not None
        if self._sampled.logprobs is None:
            return None
        found: list[TokenLogprobs | None] = [None] * self._num_samples
        for sample, message in zip(self._sampled.logprob_samples, self._sampled.logprobs.messages(), strict=True):
            found[sample] = message
        return found
