"""The weights of a GGUF file under the names and in the layout of Hugging Face checkpoints."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import Q4_K, dequantize
from numpy.typing import NDArray
from torch import Tensor

from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import GGUFFile, GGUFTensor
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.weight_packing import Index, store_rows
from radixserve.engine.weights import StoredTensor
from radixserve.kernels.packing import PANEL, WeightKind, pack_q4, pack_q8

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SANDWICHED = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILY_NAMES = {"gemma2": _SANDWICHED, "gemma3": _SANDWICHED, "phi3": {"ffn_up": "mlp.gate_up_proj"}}
# llama.cpp turns neighbouring values of their heads, not the halves; its converter moves the rows of q and k for it.
_NEIGHBOUR_PAIRS = ("llama", "mixtral", "smollm3")
_BLOCK = re.compile(r"blk\.(\d+)\.(\D+?)(?:\.(\d+))?")  # the second number, in old files, is that of an expert
# Not weights: the specification of the model has read them.
_METADATA_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_T = GGMLQuantizationType
_SUPPORTED = (
    _T.F32, _T.F16, _T.BF16, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K,
    _T.IQ1_S, _T.IQ1_M, _T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S, _T.IQ3_XXS, _T.IQ3_S, _T.IQ4_NL, _T.IQ4_XS, _T.MXFP4,
)  # fmt: skip
# What the packed layouts hold as it is; others are rounded to the next finer one.
_EXACT = {_T.Q4_0: WeightKind.Q4, _T.Q4_1: WeightKind.Q4, _T.Q4_K: WeightKind.Q4, _T.Q8_0: WeightKind.Q8}
_FLOATS = (_T.F32, _T.F16, _T.BF16)
_ReadRows = Callable[[Index], NDArray[np.uint8]]
_Order = NDArray[np.intp] | None
_CHUNK_ELEMENTS = 1 << 18  # dequantized at a time: 1 MiB of fp32, so that intermediate results stay in the cache


def gguf_tensors(gguf: GGUFFile, spec: ModelSpec) -> Iterator[StoredTensor]:
    """All weights of ``gguf``. Raises ``ModelError`` for a quantization that cannot be read."""
    for tensor in gguf.tensors.values():
        if tensor.name in _METADATA_TENSORS:
            continue
        if tensor.quantization not in _SUPPORTED:
            supported = ", ".join(kind.name for kind in _SUPPORTED)
            raise ModelError(
                f"{gguf.path.name}: {tensor.name} is {tensor.quantization.name}, which is not supported ({supported})"
            )
        name = _checkpoint_name(tensor.name, {**_BLOCK_NAMES, **_FAMILY_NAMES.get(spec.family, {})})
        rows = partial(_rows, gguf.raw(tensor.name), tensor, _half_rotation_order(tensor, spec))
        pack = partial(_pack, rows, tensor) if tensor.quantization in _EXACT else None
        copy = partial(_copy, rows, tensor)
        kind = _EXACT.get(tensor.quantization, WeightKind.BF16 if tensor.quantization in _FLOATS else WeightKind.Q8)
        yield StoredTensor(name, tensor.shape, tensor.num_bytes, copy, kind, pack)


def _checkpoint_name(name: str, block_names: Mapping[str, str]) -> str:
    """Unknown names are kept: the loader reports them as unexpected."""
    stem, _, kind = name.rpartition(".")
    if block := _BLOCK.fullmatch(stem):
        index, part, expert = block.groups()
        ours = block_names.get(part)
        if ours is not None and expert is not None:
            ours = ours.replace("mlp.", f"mlp.experts.{expert}.")
        return f"model.layers.{index}.{ours}.{kind}" if ours else name
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _copy(read: _ReadRows, tensor: GGUFTensor, place: Tensor, index: Index) -> None:
    rows = read(index[:-1])
    columns = index[-1] if index else slice(None)
    step = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
    first = 0
    for matrix in place if place.dim() == 3 else place.view(1, -1, place.shape[-1]):
        for some in matrix.split(step):
            values = dequantize(rows[first : first + len(some)], tensor.quantization)[:, columns]
            some.copy_(torch.from_numpy(np.require(values, np.float32, ["C", "W"])))
            first += len(some)


def _pack(read: _ReadRows, tensor: GGUFTensor, place: Tensor) -> None:
    step = max(PANEL, _CHUNK_ELEMENTS // tensor.shape[-1] // PANEL * PANEL)
    for first in range(0, len(place), step):
        part = read((slice(first, first + step),))
        whole = np.zeros((-(-len(part) // PANEL) * PANEL, part.shape[1]), np.uint8)
        whole[: len(part)] = part
        store_rows(torch.from_numpy(pack_gguf(whole, tensor.quantization)), place, first)


def pack_gguf(rows: NDArray[np.uint8], quantization: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Rows of blocks in a file's layout -> the packed layout, [rows, bytes a row] both; ``quantization``: one that has
    a packed layout."""
    num_rows = len(rows)
    if quantization == _T.Q4_K:
        return _pack_q4_k(rows.reshape(num_rows, -1, 144))
    block_bytes = {_T.Q4_0: 18, _T.Q4_1: 20, _T.Q8_0: 34}[quantization]
    blocks = np.ascontiguousarray(rows).reshape(num_rows, -1, block_bytes)
    d = _fp16(blocks, 0)
    if quantization == _T.Q8_0:
        return pack_q8(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), d)
    minima = _fp16(blocks, 2) if quantization == _T.Q4_1 else np.float16(-8) * d
    nibbles = blocks[..., -16:]
    return pack_q4(np.concatenate((nibbles & np.uint8(15), nibbles >> np.uint8(4)), -1), d, minima)


def _pack_q4_k(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks of 256: d, dmin, eight 6-bit scales and minima in 12 bytes, nibbles; w = d scale q - dmin minimum. The
    products of two rounded factors are rounded to fp16 once more, by 2 ** -12 at most."""
    d, dmin = (_fp16(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    found = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
    scales, minima = (each.reshape(*blocks.shape[:2], 8) for each in found)
    nibbles = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    q = np.concatenate(
        (nibbles & np.uint8(15), nibbles >> np.uint8(4)), -2
    )  # each 32 bytes hold two runs of 32 columns
    rows, count = len(blocks), blocks.shape[1] * 8
    return pack_q4(
        q.reshape(rows, count, 32),
        (d * scales).astype(np.float16).reshape(rows, count),
        (-dmin * minima).astype(np.float16).reshape(rows, count),
    )


def _fp16(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _rows(raw: NDArray[np.uint8], tensor: GGUFTensor, order: _Order, index: Index) -> NDArray[np.uint8]:
    """Of the rows of ``tensor`` in their ``order`` those at ``index`` [rows, bytes a row]; a vector is one row.
    Quantization blocks never cross rows, so these can be moved while they are still quantized."""
    if len(tensor.shape) == 1:
        return (raw if order is None else raw.reshape(len(order), -1)[order]).reshape(1, -1)
    rows = raw.reshape(*tensor.shape[:-1], -1)
    rows = rows[index] if order is None else rows[order[index]]
    return rows.reshape(-1, rows.shape[-1])


def _half_rotation_order(tensor: GGUFTensor, spec: ModelSpec) -> _Order:
    """Row (pair, half) of a head goes back to (half, pair), see ``_NEIGHBOUR_PAIRS``. None: rows stay as they are."""
    moved = re.search(r"attn_([qk])\.(weight|bias)$", tensor.name) if spec.family in _NEIGHBOUR_PAIRS else None
    if moved is None:
        return None
    num_heads = spec.num_heads if moved[1] == "q" else spec.num_kv_heads
    return np.arange(tensor.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
