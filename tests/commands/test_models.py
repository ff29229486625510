"""``radixserve models``: the list, one model, and nothing downloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from radixserve.server.cli import main
from radixserve.server.commands import models
from radixserve.server.commands.gpus import Gpu, parse_gpu
from radixserve.tests.server.byte_model import CONFIG, write_byte_model

CONFIG_KV_BYTES = 2 * 2 * 8  # keys and values, bfloat16, one head of 8 in one layer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_byte_model(tmp_path / "model")
    save_file({"a": np.zeros((10, 20), np.float32), "b": np.zeros(5, np.float16)}, folder / "model.safetensors")
    return folder


def test_a_folder_is_inspected_without_loading_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(model)]) == 0
    printed = capsys.readouterr().out
    assert "architecture  llama, 1 layers, 1 heads of 8, 1 for keys and values\n" in printed
    assert "parameters    0.0 million\n" in printed
    assert "context       512 tokens, vocabulary 262\n" in printed
    assert f"KV cache      {CONFIG_KV_BYTES} bytes a token in bfloat16\n" in printed
    assert f"KV cache      {2 * CONFIG_KV_BYTES} bytes a token in float32\n" in printed


def test_a_quantized_checkpoint_tells_its_format(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (model / "config.json").write_text(
        json.dumps({**json.loads((model / "config.json").read_text()), "quantization_config": quantization})
    )
    parts = {"qweight": np.zeros((1000, 125), np.int32), "scales": np.zeros((8, 1000), np.float16)}
    save_file({f"a.{part}": array for part, array in parts.items()}, model / "model.safetensors")
    assert main(["models", str(model)]) == 0
    printed = capsys.readouterr().out
    assert "parameters    1.0 million\n" in printed
    assert "on disk, int4 (AWQ, groups of 128), made for" in printed


def test_what_fits_is_told_for_each_device(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = 2 * 205  # 205 parameters in bfloat16
    free = [weights + CONFIG_KV_BYTES * tokens for tokens in (1024, 100)] + [weights]
    gpus = [Gpu(index, f"G{index}", "1", 2**40, size) for index, size in enumerate(free)]
    monkeypatch.setattr(models, "find_gpus", lambda: gpus)
    packed = (model / "model.safetensors").stat().st_size
    monkeypatch.setattr(models, "available_memory", lambda: packed + CONFIG_KV_BYTES * 512)
    assert main(["models", str(model)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fits on")]
    assert lines[0].endswith("1,024 tokens of KV cache: 2.0 requests of full length") and "GPU 0, G0" in lines[0]
    assert lines[1].endswith("100 tokens of KV cache: give --max-model-len 96")
    assert lines[2].endswith("the weights do not fit")
    assert "CPU" in lines[3] and lines[3].endswith("512 tokens of KV cache: 1.0 requests of full length")


def test_the_list_has_the_default_model_and_the_hugging_face_cache(model: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "hub" / "models--acme--tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    model.rename(snapshots / ("0" * 40))
    broken = tmp_path / "hub" / "models--acme--other" / "snapshots" / ("1" * 40)
    broken.mkdir(parents=True)
    (broken / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertModel"]}))
    (broken / "model.safetensors").write_bytes((snapshots / ("0" * 40) / "model.safetensors").read_bytes())

    def radixserve_models(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "radixserve.server.cli", "models", *arguments]
        environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    default, other, tiny = radixserve_models().stdout.splitlines()
    assert default.startswith("smollm2-135m-instruct") and "MiB" in default
    assert "acme/other" in other and "cannot be served: architecture BertModel is not supported" in other
    assert tiny.split()[:2] == ["acme/tiny", "llama"]
    assert "parameters" in radixserve_models("acme/tiny").stdout
    absent = radixserve_models("acme/absent")
    assert absent.returncode == 2 and "`radixserve serve acme/absent` downloads it" in absent.stderr


def test_the_drivers_table_is_read() -> None:
    assert parse_gpu("0, NVIDIA H200, 580.65.06, 143771, 143000") == Gpu(
        0, "NVIDIA H200", "580.65.06", 143771 << 20, 143000 << 20
    )
