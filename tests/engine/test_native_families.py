"""What the families do differently works with the native CPU kernels too, through the whole engine.

These round more than the torch ones that ``test_models`` compares within 1e-4, so a token counts as right when
transformers' logit for it is at most ``TIE`` standard deviations below the best one; most must be the best one itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixserve.engine.llm import LLM
from radixserve.engine.sampling_params import SamplingParams
from radixserve.kernels.select import BackendUnavailable, select_native
from radixserve.tests.engine import tiny_models

TIE, MOST = 0.25, 0.8
NUM_TOKENS = 8
RULES = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    try:
        select_native(1, print)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    "variant",
    [
        "llama-bias",
        "llama-llama3-rope",
        "mistral-window",
        "smollm3",
        "qwen2-window",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3",
    ],
)
def test_chunks_cached_prefixes_and_decodes_equal_transformers(variant: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant)
    for parameter in oracle.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = tiny_models.save(oracle, tmp_path)
    options = {"page_size": 4, "num_pages": 512, "max_num_batched_tokens": 48}
    with LLM(str(folder), device="cpu", cpu_threads=1, cpu_weights="bf16", **options) as llm:
        assert "native" in llm.description
        cold = llm.generate(tiny_models.PROMPTS, RULES)
        warm = llm.generate(tiny_models.PROMPTS[::-1], RULES)
    assert all(one.cached_tokens >= len(one.prompt_token_ids) - 8 for one in warm)
    gaps = []
    for completion in cold + warm:
        assert len(completion.token_ids) == NUM_TOKENS, completion.error
        ids = completion.prompt_token_ids + completion.token_ids
        logits = tiny_models.logits(oracle, ids)[-NUM_TOKENS - 1 : -1]
        chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gaps.append((logits.amax(1) - chosen) / logits.std(1))
    found = torch.cat(gaps)
    assert float(found.max()) < TIE and float((found == 0).float().mean()) > MOST
