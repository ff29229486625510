"""``radixserve bench offline``, ``latency`` and ``prefix``: their workload, their figures, and their mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixserve.server.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10_000, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """For a tiny random model on one core."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {"model": tmp_path, "load-format": "dummy", "device": "cpu", "cpu-threads": 1, "num-pages": 64}
    return [f"--{name}={value}" for name, value in {**options, "max-model-len": 256}.items()]


def figures(name: str, flags: list[str], tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    assert main(["bench", name, *flags, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_offline_counts_all_tokens_of_every_round(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags += ["--requests=5", "--input-len=3:9", "--output-len=4:6", "--rounds=3", "--top-k=20", "--top-p=0.95"]
    found = figures("offline", flags, tmp_path)
    assert found["requests"] == 5 and len(found["seconds"]) == len(found["tokens_per_s"]) == 3
    assert 15 <= found["prompt_tokens"] <= 45 and 20 <= found["generated_tokens"] <= 30
    for seconds, rate in zip(found["seconds"], found["tokens_per_s"], strict=True):
        assert rate == pytest.approx(found["generated_tokens"] / seconds, rel=0.05)
    assert "round 3" in capsys.readouterr().out


def test_latency_tells_first_and_further_tokens_apart(flags: list[str], tmp_path: Path) -> None:
    found = figures("latency", [*flags, "--input-len=10", "--output-len=8", "--rounds=2"], tmp_path)
    assert found["prompt_tokens"] == 10 and found["generated_tokens"] == 8 and len(found["request_ms"]) == 2
    low, high = min(found["request_ms"]) / 8, max(found["request_ms"]) / 8
    assert low - 0.01 <= found["ms_per_token"] <= high + 0.01


def test_prefix_finds_all_but_the_first_of_each_in_the_radix_cache_only(flags: list[str], tmp_path: Path) -> None:
    sizes = ["--prefixes=2", "--requests=3", "--prefix-len=48", "--own-len=5", "--output-len=3", "--rounds=2"]
    picture = tmp_path / "first_tokens.svg"
    found = figures("prefix", [*flags, *sizes, f"--plot={picture}"], tmp_path)
    assert picture.read_bytes().startswith(b"<?xml")
    for name, cached in (("radix", 2 * 2 * 48), ("naive", 0)):
        assert [one["cached_tokens"] for one in found[name]["rounds"]] == [cached, cached]
        for one in found[name]["rounds"]:
            assert one["prompt_tokens"] == 2 * 3 * 53
            assert 0 < one["ttft_p50_ms"] <= one["ttft_p99_ms"] <= 1e3 * one["seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--modl=x"], "did you mean --model?"), (["--page-size=0"], "--page-size: '0' is not allowed")],
)
def test_options_are_checked_as_those_of_serve(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", *arguments]) == 2
    assert message in capsys.readouterr().err
