"""``Ops`` and ``AttentionKernel`` on the native CPU library: packed weights, activations in fp32.

Python costs more than a small model's arithmetic when it starts every operation of a step. So a step can be recorded:
inside ``recording`` operations compute nothing, but are written down with the buffers they were given, and the
``Program`` replays all of them in one call, for any number of tokens that its buffers have room for.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout, HeadPlaces, Norm, Weight
from radixserve.kernels.native_library import NativeLibrary, Op, Step, address
from radixserve.kernels.packing import kind_of
from radixserve.kernels.shared_prefix import SharedPrefixRule
from radixserve.kernels.torch_ops import TorchOps

# OpKind and Epilogue of native/interface.h.
_LINEAR, _ROPE_STORE, _ATTEND, _NORM, _EMBED, _GATE, _SUM = range(7)
_PUT, _ADD, _SILU_MUL, _GELU_MUL = range(4)
_LANES = 16
# ``ChunkRows::kRows`` of native/attention.h.
_BLOCK_ROWS = 64
# Tokens, and their share of all. Measured, see benchmarks/notes/cpu_kernels.md.
_LEAST_SAVED = (512, 0.25)


class NotRecordable(Exception):
    """An operation has an input that none of the recorded ones has made."""


class Program:
    """Operations for up to ``capacity`` tokens, their buffers, and whatever else they point to."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._ops: list[Op] = []
        self._array: ctypes.Array[Op] = (Op * 0)()
        self._alive: list[Tensor] = []
        self._buffers: set[int] = set()  # addresses
        self._free: dict[int, list[np.ndarray[tuple[int], np.dtype[np.float32]]]] = {}

    def empty(self, width: int) -> Tensor:
        """A buffer [capacity, width]. When the last view of it is dropped, a later operation may get its memory."""
        free = self._free.setdefault(width, [])
        memory = free.pop() if free else _lines(self.capacity * width)
        lease = memory[:]  # torch keeps it alive as long as any tensor shows its memory
        self._buffers.add(memory.ctypes.data)
        weakref.finalize(lease, free.append, memory)
        return torch.from_numpy(lease).view(self.capacity, width)

    def append(self, op: Op, uses: tuple[Tensor | None, ...]) -> None:
        """``uses``: what ``op`` points to and the model or the caller owns. Raises ``NotRecordable``."""
        if not self._buffers.issuperset(filter(None, (op.input, op.output))):
            raise NotRecordable
        self._ops.append(op)
        self._alive.extend(tensor for tensor in uses if tensor is not None)

    def finish(self) -> None:
        for number, op in enumerate(self._ops):
            op.handed_on = self._is_handed_on(op, self._ops[number + 1 :])
        self._array = (Op * len(self._ops))(*self._ops)

    @staticmethod
    def _is_handed_on(op: Op, later: list[Op]) -> bool:
        """Whether only the product that comes next reads the output, and as it is."""
        if op.kind not in (_LINEAR, _ATTEND) or op.epilogue == _ADD or not later:
            return False
        reader, *others = later
        if reader.kind != _LINEAR or reader.norm or reader.input != op.output:
            return False
        for other in others:
            if op.output == other.input or (
                op.output == other.output and (other.epilogue == _ADD or other.kind == _SUM)
            ):
                return False
            if op.output == other.output:
                break
        return True

    def run(self, library: NativeLibrary, step: Step) -> None:
        assert step.tokens <= self.capacity
        library.run(self._array, step)


class NativeOps(TorchOps):
    """Packed weights are uint8 (``packing.py``); what has other weights is left to torch. Everything is contiguous."""

    def __init__(self, library: NativeLibrary):
        super().__init__()
        self._library = library
        self._program: Program | None = None

    @property
    def description(self) -> str:
        """For people: the instruction set that the library is compiled for."""
        return f"native, {self._library.level}"

    @contextmanager
    def recording(self, capacity: int) -> Iterator[Program]:
        """Write operations on tensors of ``capacity`` tokens into the program instead of running them. They may raise
        ``NotRecordable``."""
        self._program = program = Program(capacity)
        try:
            yield program
        finally:
            self._program = None
            program.finish()

    def replay(self, program: Program, ids: Tensor, positions: Tensor, slots: Tensor, layout: BatchLayout) -> None:
        """Run ``program`` for a step: ids int64, positions int32, slots int64, [T] each."""
        step = _attention_step(layout)
        step.tokens = len(ids)
        step.ids, step.positions, step.slots = address(ids), address(positions), address(slots)
        program.run(self._library, step)

    def emit(self, op: Op, step: Step, *uses: Tensor | None) -> None:
        """Run ``op``, or record it; ``uses`` are the tensors that it reads besides intermediate results."""
        if self._program is None:
            self._library.run((Op * 1)(op), step)
        else:
            self._program.append(op, uses)

    def empty(self, num_tokens: int, width: int) -> Tensor:
        if self._program is not None:
            assert num_tokens == self._program.capacity
            return self._program.empty(width)
        return torch.empty(num_tokens, width)

    def embed(self, ids: Tensor, weight: Tensor, hidden_size: int, scale: float = 1.0) -> Tensor:
        if weight.dtype != torch.uint8:
            return super().embed(ids, weight, hidden_size, scale)
        assert ids.dtype == torch.int64
        out = self.empty(len(ids), hidden_size)
        op = Op(kind=_EMBED, weight_kind=kind_of(weight, hidden_size), cols=hidden_size, eps=scale)
        op.weight, op.output = address(weight), address(out)
        self.emit(op, Step(tokens=len(ids), ids=address(ids)), weight)
        return out

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        if not _is_native(x):
            return super().rms_norm(x, norm)
        out = self.empty(*x.shape)
        op = Op(kind=_NORM, cols=x.shape[1], eps=norm.eps, norm=address(norm.weight))
        op.input, op.output = address(x), address(out)
        self.emit(op, Step(tokens=len(x)), norm.weight)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if not _is_native(x):
            return super().add_rms_norm(x, residual, norm)
        self._add(x, residual)
        return self.rms_norm(residual, norm), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, _SILU_MUL) if _is_native(gate_up) else super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, _GELU_MUL) if _is_native(gate_up) else super().gelu_mul(gate_up)

    def rope_store(self, qkv: Tensor, places: HeadPlaces) -> Tensor:
        positions, cos_sin, slots, k_cache, v_cache, q_norm, k_norm = places
        kv_heads, head_dim = k_cache.shape[-2:]
        q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
        out = self.empty(len(qkv), q_heads * head_dim)
        op = Op(kind=_ROPE_STORE, rotary_dim=cos_sin.shape[1], q_heads=q_heads)
        _set_cache(op, k_cache, v_cache)
        op.input, op.output, op.cos_sin = address(qkv), address(out), address(cos_sin)
        norms = [norm.weight for norm in (q_norm, k_norm) if norm]
        if q_norm and k_norm:
            op.q_norm, op.k_norm, op.eps = address(q_norm.weight), address(k_norm.weight), q_norm.eps
        step = Step(tokens=len(qkv), positions=address(positions), slots=address(slots))
        self.emit(op, step, cos_sin, k_cache, v_cache, *norms)
        return out.view(len(qkv), q_heads, head_dim)

    def project(
        self, stream: Tensor, pending: Tensor | None, norm: Norm, weight: Weight, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        if not _is_packed(weight):
            return super().project(stream, pending, norm, weight, bias, gated=gated)
        if pending is not None:
            self._add(pending, stream)
        out = self.empty(len(stream), len(weight) // 2 if gated else len(weight))
        op = _linear(stream, weight, bias, out, _SILU_MUL if gated else _PUT)
        op.norm, op.eps = address(norm.weight), norm.eps
        self.emit(op, Step(tokens=len(stream)), weight, bias, norm.weight)
        return stream, out

    def linear(self, y: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if not _is_packed(weight):
            return super().linear(y, weight, bias)
        out = self.empty(len(y), len(weight))
        self.emit(_linear(y, weight, bias, out, _PUT), Step(tokens=len(y)), weight, bias)
        return out

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if not _is_packed(weight):
            return super().add_linear(stream, y, weight, bias)
        self.emit(_linear(y, weight, bias, stream, _ADD), Step(tokens=len(y)), weight, bias)
        return stream, None

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if weight.dtype != torch.uint8:
            return super().logits(hidden, weight, out)
        assert out is None, "nothing here is captured in graphs"
        hidden, out = hidden.contiguous(), torch.empty(len(hidden), len(weight))
        self.emit(_linear(hidden, weight, None, out, _PUT), Step(tokens=len(hidden)), weight)
        return out

    def _add(self, x: Tensor, to: Tensor) -> None:
        op = Op(kind=_SUM, cols=x.shape[1], input=address(x), output=address(to))
        self.emit(op, Step(tokens=len(x)))

    def _gate(self, gate_up: Tensor, epilogue: int) -> Tensor:
        num_tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = self.empty(num_tokens, width)
        op = Op(kind=_GATE, epilogue=epilogue, cols=width, input=address(gate_up), output=address(out))
        self.emit(op, Step(tokens=num_tokens))
        return out


class NativeAttention:
    """``AttentionKernel`` over fp32 or bf16 pages; queries and results are fp32."""

    plans_on_device = False

    def __init__(self, shape: AttentionShape, ops: NativeOps, *, reads_shared: bool = False):
        # Windows hide prefixes.
        members = _BLOCK_ROWS * shape.num_kv_heads // shape.num_heads
        can_share = reads_shared and members > 1 and None in shape.windows
        self.shared_prefixes = SharedPrefixRule(members, *_LEAST_SAVED) if can_share else None
        self._shape = shape
        self._ops = ops
        self._step = Step()
        self._layout: BatchLayout | None = None

    @property
    def layout(self) -> BatchLayout:
        """Of the current step."""
        assert self._layout is not None, "plan first"
        return self._layout

    def plan(self, layout: BatchLayout) -> None:
        self._layout, self._step = layout, _attention_step(layout)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        num_tokens, q_heads, head_dim = q.shape
        out = self._ops.empty(num_tokens, q_heads * head_dim)
        op = Op(kind=_ATTEND, q_heads=q_heads, input=address(q), output=address(out))
        _set_cache(op, k_cache, v_cache)
        op.score_scale, op.softcap = self._shape.score_scale, self._shape.softcap or 0.0
        op.window = window or 1 << 62
        self._step.tokens = num_tokens
        self._ops.emit(op, self._step, k_cache, v_cache)
        return out.view(num_tokens, q_heads, head_dim)


def _lines(size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Memory from the beginning of a cache line: else each vector that is stored touches two."""
    memory = np.empty(size + _LANES, np.float32)
    return memory[-memory.ctypes.data % (4 * _LANES) // 4 :][:size]


def _is_packed(weight: Weight) -> TypeGuard[Tensor]:
    return isinstance(weight, Tensor) and weight.dtype == torch.uint8


def _is_native(x: Tensor) -> bool:
    return x.dim() == 2 and x.dtype == torch.float32 and x.shape[1] % (2 * _LANES) == 0


def _attention_step(layout: BatchLayout) -> Step:
    step = Step(
        sequences=len(layout.rows),
        rows=address(layout.rows),
        kv_lens=address(layout.kv_lens),
        query_starts=address(layout.query_starts),
        page_table=address(layout.page_table),
        table_stride=layout.page_table.shape[1],
    )
    if layout.shared is not None:
        lens, _, members = layout.shared
        own, of_tiles = lens.split((layout.num_decodes, len(members)))
        step.tiles, step.tile_members = int(of_tiles.count_nonzero()), members.shape[1]
        step.own_lens, step.tile_lens, step.members = address(own), address(of_tiles), address(members)
    return step


def _set_cache(op: Op, k_cache: Tensor, v_cache: Tensor) -> None:
    _, op.page_size, op.kv_heads, op.head_dim = k_cache.shape
    op.cache_bf16 = k_cache.dtype == torch.bfloat16
    op.page_stride = k_cache.stride(0)
    assert k_cache[0].is_contiguous() and k_cache.stride() == v_cache.stride()
    op.k_cache, op.v_cache = k_cache.data_ptr(), v_cache.data_ptr()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, epilogue: int) -> Op:
    op = Op(kind=_LINEAR, epilogue=epilogue, rows=len(weight), cols=x.shape[1])
    op.weight_kind, op.weight, op.bias = kind_of(weight, x.shape[1]), address(weight), address(bias)
    op.input, op.output = address(x), address(out)
    return op
