"""Executes step plans: one forward pass over paged KV, then sampling. Implements ``step.Runner``.

``launch`` only enqueues work: it never waits for the device, so on CUDA the next plan can be made meanwhile.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.messages import TokenLogprobs
from radixserve.engine.models.registry import CausalLM
from radixserve.engine.prompt_logprobs import PromptLogprobs, ScoredChunk
from radixserve.engine.sampler import SampleBatch, Sampled, Sampler
from radixserve.engine.step import Int32s, StepPlan, StepResult
from radixserve.engine.step_inputs import StepInputs, lay_out, upload
from radixserve.engine.transfer import record_event
from radixserve.kernels.interface import AttentionKernel, BatchLayout, Ops
from radixserve.kvcache.mha import MHAKVCache


class ModelRunner:
    """Owns the weights, the KV buffer, the page table on the device with its mirror on the host, every row's last
    token, and the sampler's state. Plans run in launch order on the current stream."""

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
        self._prompt_logprobs = PromptLogprobs(lambda hidden: model.logits(hidden, ops))
        self._device = kv.buffer.device
        self._page_size = kv.buffer.shape[3]
        self._k_caches, self._v_caches = kv.buffer[0].unbind(0), kv.buffer[1].unbind(0)
        self._page_table_host: Int32s = np.zeros((max_rows, max_pages_per_row), np.int32)
        self._page_table = torch.zeros((max_rows, max_pages_per_row), dtype=torch.int32, device=self._device)
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue ``plan``, which has at least one token."""
        self._sampler.set_rows(plan.setups)
        for setup in plan.setups:
            self._prompt_logprobs.set_row(setup.row, setup.sampling.prompt_logprobs)
        self._page_table_host[plan.page_rows, plan.page_cols] = plan.page_ids
        host = lay_out(plan, self._page_table_host, self._page_size)
        inputs = upload(host, self._device)
        if len(plan.page_ids):
            self._page_table[inputs.page_rows, inputs.page_cols] = inputs.page_ids
        num_decodes = len(plan.decode_rows)
        hidden = self._forward(num_decodes, host, inputs)
        scored = self._prompt_logprobs.score(plan.chunks, hidden[num_decodes:])
        sampled = self._sample(hidden, host, inputs) if len(host.sample_rows) else None
        return LaunchedStep(sampled, scored, self._device)

    def _forward(self, num_decodes: int, host: StepInputs[Int32s], inputs: StepInputs[Tensor]) -> Tensor:
        """Final hidden states [T, H]."""
        layout = BatchLayout(
            num_decodes=num_decodes,
            page_size=self._page_size,
            rows=inputs.rows,
            kv_lens=inputs.kv_lens,
            query_starts=inputs.query_starts,
            page_table=self._page_table,
            rows_host=host.rows,
            kv_lens_host=host.kv_lens,
            query_starts_host=host.query_starts,
            page_table_host=self._page_table_host,
        )
        self._attention.plan(layout)
        context = ForwardContext(
            ops=self._ops,
            attention=self._attention,
            positions=inputs.positions,
            slots=inputs.slots.long(),
            k_caches=self._k_caches,
            v_caches=self._v_caches,
        )
        decode_ids = self._last_tokens[inputs.rows[:num_decodes]]
        return self._model(torch.cat((decode_ids, inputs.chunk_ids)), context)

    def _sample(self, hidden: Tensor, host: StepInputs[Int32s], inputs: StepInputs[Tensor]) -> Sampled:
        """Sample for the sequences that want it and remember their tokens."""
        everywhere = len(host.sample_tokens) == len(hidden)
        logits = self._model.logits(hidden if everywhere else hidden[inputs.sample_tokens], self._ops)
        batch = SampleBatch(inputs.sample_rows, inputs.sample_lens, host.sample_rows, host.sample_lens)
        sampled = self._sampler.sample(logits, batch)
        self._last_tokens[inputs.sample_rows] = sampled.token_ids
        return sampled


class LaunchedStep:
    """A ``PendingStep`` whose results are on their way to the host."""

    def __init__(self, sampled: Sampled | None, scored: list[ScoredChunk], device: torch.device):
        self._sampled = sampled.to_host() if sampled else None
        self._scored = [chunk.to_host() for chunk in scored]
        self._done = record_event(device)

    def result(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        prompt_logprobs = {chunk.row: chunk.messages() for chunk in self._scored} or None
        if self._sampled is None:
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.bool_), prompt_logprobs=prompt_logprobs)
        tokens = self._sampled.token_ids.numpy().astype(np.int32)
        return StepResult(tokens, self._sampled.failed.numpy(), self._logprobs(len(tokens)), prompt_logprobs)

    def _logprobs(self, num_samples: int) -> list[TokenLogprobs | None] | None:
        assert self._sampled is not None
        if self._sampled.logprobs is None:
            return None
        found: list[TokenLogprobs | None] = [None] * num_samples
        for sample, message in zip(self._sampled.logprob_samples, self._sampled.logprobs.messages(), strict=True):
            found[sample] = message
        return found
