"""Writes tiny checkpoints as quantizers do, from the definitions of their formats and not with our own code.

Each writer takes a matrix [N, K] and gives its tensors, and the fp32 matrix that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixserve.tests.engine import tiny_models

GROUP, BLOCK = 32, (32, 64)
_KEPT = ("embed_tokens", "lm_head", "mlp.gate", "moe.gate")  # what quantizers leave as it is
Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]


def save_quantized(variant: str, folder: Path, write: Writer, config: dict[str, Any], **sizes: Any) -> Any:
    """A checkpoint in ``folder`` and its oracle, whose weights are what the checkpoint's stand for. ``sizes``: of the
    model, where they are not the usual ones."""
    oracle = tiny_models.make(variant, **sizes)
    path = tiny_models.save(oracle, folder) / "model.safetensors"
    stored: dict[str, Tensor] = {}
    meant = load_file(path)
    for name, values in meant.items():
        module = name.removesuffix(".weight")
        if values.dim() != 2 or module.endswith(_KEPT):
            stored[name] = values
            continue
        tensors, meant[name] = write(values)
        for part, tensor in tensors.items():
            if part != "bias" or f"{module}.bias" not in meant:
                stored[f"{module}.{part}"] = tensor.contiguous()
    save_file(meant, path, metadata={"format": "pt"})
    oracle = type(oracle).from_pretrained(folder).float().eval()
    save_file(stored, path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return oracle


# ---- fp8 ----


def fp8_by_matrix(values: Tensor) -> Written:
    return _fp8(values, values.abs().max() / 448, "weight_scale")


def fp8_by_row(values: Tensor) -> Written:
    return _fp8(values, values.abs().amax(1, keepdim=True) / 448, "weight_scale")


def fp8_by_block(values: Tensor) -> Written:
    """The last blocks may be cut off."""
    (rows, cols), (high, wide) = values.shape, BLOCK
    scales = torch.empty(-(-rows // high), -(-cols // wide))
    spread = torch.empty_like(values)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = values[place].abs().max() / 448
            spread[place] = scales[i, j]
    tensors, meaning = _fp8(values, spread, "weight_scale_inv")
    return {**tensors, "weight_scale_inv": scales}, meaning


def _fp8(values: Tensor, scales: Tensor, name: str) -> Written:
    rounded = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": rounded, name: scales, "input_scale": torch.ones(1)}, rounded.float() * scales


# ---- 4 bits ----


def awq(values: Tensor) -> Written:
    nibbles, scales, zeros, meaning = _int4(values)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": _pack(nibbles.t()[:, _by_eights(nibbles.shape[0], order)], 1),
        "qzeros": _pack(zeros.t()[:, _by_eights(nibbles.shape[0], order)], 1),
        "scales": scales.t().half(),
    }, meaning


def gptq(values: Tensor, offset: int = 1, order: list[int] | None = None) -> Written:
    """``offset``: by how much zero points are stored too low; ``order``: columns as they are quantized."""
    cols = values.shape[1]
    order = list(range(cols)) if order is None else order
    nibbles, scales, zeros, meaning = _int4(values[:, order])
    groups = torch.empty(cols, dtype=torch.int32)
    groups[order] = torch.arange(cols, dtype=torch.int32) // GROUP
    nibbles, meaning = (torch.empty_like(each).index_copy_(1, torch.tensor(order), each) for each in (nibbles, meaning))
    tensors = {"qweight": _pack(nibbles.t(), 0), "qzeros": _pack(zeros.t() - offset, 1), "scales": scales.t().half()}
    return {**tensors, "g_idx": groups, "bias": torch.zeros(len(values))}, meaning


def gptq_in_another_order(values: Tensor) -> Written:
    generator = torch.Generator().manual_seed(values.shape[1])  # the same for all matrices of one input
    return gptq(values, order=torch.randperm(values.shape[1], generator=generator).tolist())


def gptq_v2(values: Tensor) -> Written:
    return gptq(values, offset=0)


def compressed_int4(values: Tensor) -> Written:
    nibbles, scales, zeros, meaning = _int4(values)
    shape = torch.tensor(values.shape)
    tensors = {"weight_packed": _pack(nibbles, 1), "weight_scale": scales.half(), "weight_zero_point": _pack(zeros, 0)}
    return {**tensors, "weight_shape": shape}, meaning


def compressed_int4_symmetric(values: Tensor) -> Written:
    scales = (values.view(len(values), -1, GROUP).abs().amax(2) / 7).half().float()
    nibbles = (values.view(len(values), -1, GROUP) / scales[..., None] + 8).round().clamp(0, 15)
    meaning = ((nibbles - 8) * scales[..., None]).view(values.shape)
    return {"weight_packed": _pack(nibbles.view(values.shape).int(), 1), "weight_scale": scales.half()}, meaning


def _int4(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nibbles int32 [N, K], fp32 scales (which fp16 holds) and zero points int32 [N, K / GROUP], and what they mean."""
    groups = values.view(len(values), -1, GROUP)
    lowest, highest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = ((highest - lowest) / 14).half().float()
    zeros = (-lowest / scales).round().clamp(1, 15)  # 0 is not stored by GPTQ's first version
    nibbles = (groups / scales + zeros).round().clamp(0, 15)
    meaning = ((nibbles - zeros) * scales).view(values.shape)
    return nibbles.view(values.shape).int(), scales[..., 0], zeros[..., 0].int(), meaning


def _by_eights(count: int, order: list[int]) -> list[int]:
    return [first + each for first in range(0, count, 8) for each in order]


def _pack(nibbles: Tensor, dim: int) -> Tensor:
    """Eight neighbours along ``dim`` into one int32, the first in the lowest bits."""
    eights = nibbles.long().unflatten(dim, (-1, 8))
    shifts = torch.arange(0, 32, 4).view(8, *[1] * (nibbles.dim() - 1 - dim))
    packed = (eights << shifts).sum(dim + 1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()
