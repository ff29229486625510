"""``radixserve doctor``: what it finds here, and what it says about machines that lack something."""

from __future__ import annotations

import socket

import pytest

from radixserve.server.cli import main
from radixserve.server.commands.doctor import check_device, check_memory, check_open_files, check_port
from radixserve.server.commands.gpus import Gpu

GPU = Gpu(0, "NVIDIA H200", "580.65", 140 << 30, 139 << 30)
ON_CPU = {"device": "cpu", "dtype": "float32", "cuda": "", "ops": "TorchOps", "attention": "TorchAttention"}


def test_a_machine_that_can_serve_is_told_so_and_a_taken_port_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--port", str(port)]) == 1
    lines = capsys.readouterr().out.splitlines()
    broken = [line for line in lines if line.startswith("BROKEN")]
    assert broken == [f"BROKEN port {port} on 127.0.0.1 is taken"]
    assert "       -> stop what listens there, or choose another with --port (0: any)" in lines
    assert any("kernels: attention NativeAttention, layers NativeOps (native" in line for line in lines)
    assert any("the default model, smollm2-135m-instruct, is installed" in line for line in lines)


def test_a_free_port_is_fine() -> None:
    assert check_port("127.0.0.1", 0).state == "ok"


def test_little_memory_and_few_descriptors_are_weak_and_have_a_remedy() -> None:
    assert check_memory(4 << 30).state == check_open_files(65536).state == check_open_files(-1).state == "ok"
    for finding in (check_memory(100 << 20), check_open_files(256)):
        assert finding.state == "weak" and finding.remedy


def test_a_gpu_that_torch_cannot_use_is_broken() -> None:
    gpu, broken, kernels = check_device([GPU], ON_CPU)
    assert gpu.what == "GPU 0: NVIDIA H200, driver 580.65, 139.0 of 140.0 GiB free"
    assert broken.state == "broken" and "torch is built without CUDA" in broken.what
    assert kernels.what.endswith("kernels: attention TorchAttention, layers TorchOps")


def test_without_a_gpu_the_cpu_is_fine() -> None:
    assert [finding.state for finding in check_device([], ON_CPU)] == ["ok", "ok"]


def test_a_cpu_without_its_fast_kernels_is_weak_and_has_a_remedy() -> None:
    _, kernels = check_device([], {**ON_CPU, "slow": "there is no C++ compiler: install one"})
    assert (kernels.state, kernels.remedy) == ("weak", "install one")
    assert "as there is no C++ compiler" in kernels.what


def test_kernels_that_cannot_be_loaded_are_broken() -> None:
    *_, last = check_device([GPU], {"error": "attention on CUDA needs FlashInfer"})
    assert last.state == "broken" and last.what == "attention on CUDA needs FlashInfer" and last.remedy
