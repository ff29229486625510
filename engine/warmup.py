"""Steps that a runner takes before it serves: they load kernels and show how much memory a step takes."""

from __future__ import annotations

import numpy as np

from radixserve.engine.runner import ModelRunner
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.step import PrefillChunk, RowSetup, StepPlan


def warm_up(runner: ModelRunner, num_tokens: int, num_rows: int, max_len: int, vocab_size: int) -> None:
    """Run a step of ``num_tokens`` prompt tokens in ``num_rows`` sampling sequences, all on page 0, so that kernels are
    loaded, and the memory of a step of that size is known. Only before the runner serves requests."""
    num_rows = min(num_rows, num_tokens)
    share = min(max_len, num_tokens // num_rows)
    ids = (np.arange(share) % vocab_size).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    sampling = SamplingParams(temperature=0.9, top_p=0.9)
    plan = StepPlan(
        step=0,
        setups=tuple(RowSetup(row, sampling, 0, ids, share, ()) for row in range(num_rows)),
        page_rows=nothing,
        page_cols=nothing,
        page_ids=nothing,
        decode_rows=nothing,
        decode_lens=nothing,
        chunks=tuple(PrefillChunk(row, ids, 0, True) for row in range(num_rows)),
    )
    runner.launch(plan).result()
