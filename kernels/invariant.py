"""Results that depend on a token and those before it only: not on the batch, on chunks, or on what was cached.

A product of a matrix with more rows may be computed in another order, so that the same row comes out with other last
bits, and a greedy choice between two near equals falls differently. Here every product has the same number of rows, and
every token attends by itself, as if it were decoded; so the shapes that a kernel sees never depend on the neighbours.
(The idea: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels.interface import BatchLayout
from radixserve.kernels.torch_attention import TorchAttention
from radixserve.kernels.torch_ops import TorchOps

# Rows of each product. More make prompts cheaper, and single decodes dearer.
BLOCK_ROWS = 16


class InvariantOps(TorchOps):
    """Products in blocks of ``BLOCK_ROWS`` rows, the last one padded; all else is done row by row anyway."""

    def _product(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = len(y)
        padded = F.pad(y, (0, 0, 0, -num_rows % BLOCK_ROWS))
        out = torch.empty(len(padded), len(weight), dtype=y.dtype, device=y.device)
        for rows, product in zip(padded.split(BLOCK_ROWS), out.split(BLOCK_ROWS), strict=True):
            self._pulse()
            product.copy_(F.linear(rows, weight, bias))
        return out[:num_rows]


class InvariantAttention(TorchAttention):
    """Every token of a step attends by itself, with kernels that are chosen by the number of tokens before it."""

    def plan(self, layout: BatchLayout) -> None:
        super().plan(_one_token_each(layout))


def _one_token_each(layout: BatchLayout) -> BatchLayout:
    """The same step, its chunks taken apart into decodes."""
    starts = layout.query_starts_host
    counts = np.diff(starts)
    num_tokens = int(starts[-1])
    position = np.arange(num_tokens) - np.repeat(starts[:-1], counts)  # of a token in its chunk
    return replace(
        layout,
        num_decodes=num_tokens,
        rows_host=np.repeat(layout.rows_host, counts),
        kv_lens_host=(np.repeat(layout.kv_lens_host - counts, counts) + position + 1).astype(np.int32),
        query_starts_host=np.arange(num_tokens + 1, dtype=np.int32),
        shared=None,
    )
