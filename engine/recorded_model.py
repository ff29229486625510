"""Runs a model on a CPU as one recorded list of operations, where that is the same as running its code."""

import contextlib
import logging

import torch
from torch import Tensor

from radixserve.engine.decoder import CausalLM
from radixserve.engine.layers.context import ForwardContext
from radixserve.kernels.interface import Ops
from radixserve.kernels.native_ops import NativeAttention, NativeOps, NotRecordable, Program

_log = logging.getLogger(__name__)


class RecordedModel:
    """A ``CausalLM``. The first step runs the model's code and records it; if a replay of the record gives the same
    bits (a model that computes with anything but ``Ops`` and attention does not), later steps are replays."""

    def __init__(self, model: CausalLM, ops: NativeOps, attention: NativeAttention, capacity: int):
        self._model = model
        self._ops = ops
        self._attention = attention
        self._capacity = capacity  # tokens of a step; larger ones run the model's code
        self._program: Program | None = None
        self._hidden = torch.empty(0)
        self._is_recorded = False

    def __call__(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        if self._program is not None and len(ids) <= self._capacity:
            return self._replay(self._program, ids, ctx)
        hidden = self._model(ids, ctx)
        if not self._is_recorded and len(ids) <= self._capacity:
            self._is_recorded = True
            self._record(ids, ctx, hidden)
        return hidden

    def logits(self, hidden: Tensor, ops: Ops, out: Tensor | None = None) -> Tensor:
        return self._model.logits(hidden, ops, out)

    def _record(self, ids: Tensor, ctx: ForwardContext, expected: Tensor) -> None:
        size = self._capacity
        positions, slots = torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)
        placeholder = ForwardContext(self._ops, self._attention, positions, slots, ctx.k_caches, ctx.v_caches)
        with contextlib.suppress(NotRecordable), self._ops.recording(size) as program:
            self._hidden = self._model(torch.zeros(size, dtype=torch.int64), placeholder)
            self._program = program
        if self._program is None or not torch.equal(self._replay(self._program, ids, ctx), expected):
            self._program = None
            _log.warning("this model's steps cannot be replayed as one call, so they are slower than they could be")

    def _replay(self, program: Program, ids: Tensor, ctx: ForwardContext) -> Tensor:
        self._ops.replay(program, ids, ctx.positions, ctx.slots, self._attention.layout)
        return self._hidden[: len(ids)]
