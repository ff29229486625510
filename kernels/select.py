"""The one place that chooses kernels. A backend that was asked for by name and cannot load is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from radixserve.kernels.interface import (
    AttentionKernel,
    AttentionShape,
    DecodeInputs,
    Ops,
    PlannedAttention,
    RankSums,
    SamplingKernels,
)
from radixserve.kernels.invariant import InvariantAttention, InvariantOps
from radixserve.kernels.native_library import NativeUnavailable, load_native
from radixserve.kernels.native_ops import NativeOps
from radixserve.kernels.torch_attention import TorchAttention
from radixserve.kernels.torch_ops import TorchOps

# What FlashInfer and the Triton kernels are compiled for.
_FLASHINFER_DIMS = (64, 128, 256)
_TRITON_DIMS = range(64, 257, 16)
_HALF_TYPES = (torch.bfloat16, torch.float16)
# Query heads that share a key-value head: the rows of one tensor-core product.
_MAX_GROUP = 16
# With more of them no second decode fits into that product; with wider heads registers do not suffice.
_MAX_SHARED_GROUP = 8
_MAX_SHARED_DIM = 128


class BackendUnavailable(Exception):
    """A kernel backend cannot be used here; the message says why and what to do."""


def select_native(
    num_threads: int, report: Callable[[str], None], pulse: Callable[[], None] = lambda: None
) -> NativeOps:
    """The native kernels of a CPU, for packed weights; ``report`` is told if they must be compiled first, ``pulse`` is
    called some times a second while they compute. Raises ``BackendUnavailable``."""
    try:
        return NativeOps(load_native(num_threads, report, pulse))
    except NativeUnavailable as error:
        raise BackendUnavailable(str(error)) from error


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    moe_backend: str = "auto",
    *,
    deterministic: bool = False,
    sums: RankSums | None = None,
    pulse: Callable[[], None] = lambda: None,
) -> Ops:
    """Operations of a layer for ``device`` and activations of ``dtype``; ``select_native`` for packed weights.
    ``moe_backend``: "torch" has experts multiplied by torch, on a GPU too. ``deterministic``: results of a token must
    not depend on its batch. ``sums``: they have norms make the sums over ranks, if ``makes_sums``. ``pulse``: as in
    ``select_native``, for torch on a CPU."""
    by_torch = InvariantOps(pulse) if deterministic else TorchOps(pulse)
    if not makes_sums(device, dtype):
        return by_torch
    from radixserve.kernels.cuda_invariant import InvariantCudaOps  # Triton comes with torch for CUDA only
    from radixserve.kernels.cuda_ops import CudaOps
    from radixserve.kernels.triton_even import EvenProducts

    experts = by_torch if moe_backend == "torch" else None
    is_hopper = _has_pdl(device)  # or later: torch's products of e4m3 with scales of rows are made for it
    if deterministic:
        return InvariantCudaOps(is_hopper, experts, multiplies_fp8=is_hopper, sums=sums)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    even = EvenProducts(multiprocessors, device) if torch.cuda.get_device_capability(device) == (9, 0) else None
    return CudaOps(is_hopper, experts, multiplies_fp8=is_hopper, sums=sums, even=even)


def makes_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether operations for them can make sums over ranks along with norms."""
    return device.type == "cuda" and dtype in _HALF_TYPES


def select_sampling(device: torch.device) -> SamplingKernels | None:
    """The kernels that sample, or None where torch's operations do it."""
    if device.type != "cuda":
        return None
    from radixserve.kernels.triton_logits import TritonSampling

    return TritonSampling(_has_pdl(device))


def select_peer_sums(rank: int, mailboxes: Sequence[int], slice_bytes: int, device: torch.device) -> RankSums:
    """Sums over ranks by kernels that write to ``mailboxes``, see ``triton_peers.PeerSums``."""
    from radixserve.kernels.triton_peers import PeerSums

    return PeerSums(rank, mailboxes, slice_bytes, device)


def select_decode_inputs(device: torch.device) -> DecodeInputs | None:
    """The kernel that starts a captured step, or None where there are no graphs."""
    if device.type != "cuda":
        return None
    from radixserve.kernels.triton_ops import decode_inputs

    return decode_inputs


def select_attention(
    backend: str,
    shape: AttentionShape,
    device: torch.device,
    max_seqs: int,
    *,
    reads_shared: bool = False,
    deterministic: bool = False,
) -> AttentionKernel:
    """The attention kernel named by ``--attention-backend``, for steps of up to ``max_seqs`` sequences.
    ``reads_shared``: it shall read shared prefixes once, if it can. ``deterministic``: as for ``select_ops``. Raises
    ``BackendUnavailable``."""
    if deterministic:
        return _invariant_attention(backend, shape, device, max_seqs)
    if backend != "auto" and _is_flashinfer(backend, shape) and shape.has_narrow_cache:
        raise BackendUnavailable(
            f"kv_cache_dtype fp8 does not go with --attention-backend {backend}, which leaves this model to "
            f"FlashInfer; use --attention-backend auto"
        )
    fits = _fits_cuda(backend, shape, device)
    if backend == "torch" or (backend == "auto" and not fits):
        return TorchAttention(shape, device, reads_shared=reads_shared)
    if not fits:
        raise BackendUnavailable(
            f"attention backend {backend!r} needs a CUDA device, bfloat16 or float16, and heads of "
            f"{_head_dims(backend, shape)} values; here are {device.type}, {shape.dtype} and {shape.head_dim}. "
            f"Use --attention-backend torch"
        )
    return _cuda_attention(backend, shape, device, max_seqs, reads_shared)


def _fits_cuda(backend: str, shape: AttentionShape, device: torch.device) -> bool:
    fits = _fits_flashinfer(shape) if _is_flashinfer(backend, shape) else shape.head_dim in _TRITON_DIMS
    return device.type == "cuda" and shape.dtype in _HALF_TYPES and fits


def _fits_flashinfer(shape: AttentionShape) -> bool:
    """It would have kernels for a narrow cache too, but each pair of types takes minutes to compile."""
    return shape.head_dim in _FLASHINFER_DIMS and not shape.has_narrow_cache


def _is_flashinfer(backend: str, shape: AttentionShape) -> bool:
    """Whether all is left to FlashInfer."""
    return backend == "flashinfer" or shape.num_heads // shape.num_kv_heads > _MAX_GROUP


def _head_dims(backend: str, shape: AttentionShape) -> str:
    """For people."""
    if _is_flashinfer(backend, shape):
        return ", ".join(map(str, _FLASHINFER_DIMS))
    return f"{_TRITON_DIMS[0]} to {_TRITON_DIMS[-1]}, by {_TRITON_DIMS.step},"


def _invariant_attention(backend: str, shape: AttentionShape, device: torch.device, max_seqs: int) -> AttentionKernel:
    if device.type == "cpu" and backend in ("auto", "torch"):
        return InvariantAttention(shape, device)
    if _fits_cuda("triton", shape, device) and backend in ("auto", "triton"):
        from radixserve.kernels.cuda_invariant import InvariantCudaAttention

        return InvariantCudaAttention(shape, max_seqs, device, pdl=_has_pdl(device))
    raise BackendUnavailable(
        f"--deterministic needs --attention-backend auto and, on a GPU, --dtype bfloat16 or float16 and heads of "
        f"{_head_dims('triton', shape)} values; here are {backend}, {device.type}, {shape.dtype} and "
        f"{shape.head_dim}"
    )


def _flashinfer(shape: AttentionShape, device: torch.device) -> PlannedAttention:
    try:
        from radixserve.kernels.flashinfer_attention import FlashInferAttention
    except ImportError as error:
        raise BackendUnavailable(
            f"attention on CUDA needs FlashInfer, which cannot be imported ({error}): install radixserve[cuda], or use "
            f"--attention-backend torch"
        ) from error
    return FlashInferAttention(shape, device)


def _cuda_attention(
    backend: str, shape: AttentionShape, device: torch.device, max_seqs: int, reads_shared: bool
) -> AttentionKernel:
    if _is_flashinfer(backend, shape):
        return _flashinfer(shape, device)
    chunks = _flashinfer(shape, device) if _fits_flashinfer(shape) else None
    from radixserve.kernels.split_attention import SplitAttention
    from radixserve.kernels.triton_attention import TritonDecodeAttention
    from radixserve.kernels.triton_extend import TritonExtendAttention

    pdl = _has_pdl(device)
    decodes, unplanned = TritonDecodeAttention(shape, max_seqs, device, pdl), TritonExtendAttention(shape, pdl)
    fits = decodes.group <= _MAX_SHARED_GROUP and shape.head_dim <= _MAX_SHARED_DIM and None in shape.windows
    if not (reads_shared and fits):
        return SplitAttention(decodes, chunks, unplanned)
    from radixserve.kernels.triton_shared_attention import TritonSharedAttention

    return SplitAttention(decodes, chunks, unplanned, TritonSharedAttention(decodes, max_seqs, device))


def _has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
