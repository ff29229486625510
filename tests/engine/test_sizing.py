"""What "auto" comes to."""

from pathlib import Path

import pytest
import torch

from radixserve.configs.schema import CacheOptions, ModelOptions, RunnerOptions, SchedulerOptions
from radixserve.engine import host
from radixserve.engine.errors import ConfigError
from radixserve.engine.host import available_memory, usable_cores
from radixserve.engine.model_spec import LayerSpec, ModelSpec
from radixserve.engine.rope_spec import RopeSpec
from radixserve.engine.sizing import (
    check_num_pages,
    choose_dtype,
    choose_max_num_seqs,
    choose_model_len,
    choose_num_pages,
    choose_overlap,
    choose_page_size,
    choose_step_tokens,
    choose_target_itl,
    choose_torch_dtype,
    cpu_kv_bytes,
    cuda_kv_bytes,
)

SPEC = ModelSpec("llama", 100, 64, 96, 4, 2, 16, 1e-5, (LayerSpec(RopeSpec(1e4, 16)),) * 2, max_position=2048)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("requested", "checkpoint", "device", "native_bf16", "expected"),
    [
        ("auto", "bfloat16", "cpu", True, torch.bfloat16),
        ("auto", "bfloat16", "cpu", False, torch.float32),
        ("auto", "float16", "cpu", False, torch.float32),
        ("auto", "bfloat16", "cuda", False, torch.bfloat16),
        ("auto", "float16", "cuda", False, torch.float16),
        ("auto", "float32", "cuda", False, torch.bfloat16),
        ("float32", "bfloat16", "cuda", True, torch.float32),
    ],
)
def test_dtype(requested: str, checkpoint: str, device: str, native_bf16: bool, expected: torch.dtype) -> None:
    assert choose_dtype(requested, checkpoint, device, native_bf16) is expected


def test_one_type_of_weights_and_kv_where_torch_computes() -> None:
    assert choose_torch_dtype(RunnerOptions(cpu_weights="fp32"), "auto", "cpu") == "float32"
    assert choose_torch_dtype(RunnerOptions(cpu_weights="bf16"), "bfloat16", "cpu") == "bfloat16"
    assert choose_torch_dtype(RunnerOptions(), "float16", "cpu") == "float16"
    assert choose_torch_dtype(RunnerOptions(cpu_weights="fp32"), "bfloat16", "cuda") == "bfloat16"
    with pytest.raises(ConfigError, match="dtype float16 does not go with --cpu-weights fp32"):
        choose_torch_dtype(RunnerOptions(cpu_weights="fp32"), "float16", "cpu")


def test_model_len_is_the_models_own_unless_a_smaller_one_is_asked_for() -> None:
    assert choose_model_len(ModelOptions(), SPEC) == 2048
    assert choose_model_len(ModelOptions(max_model_len=100), SPEC) == 100
    with pytest.raises(ConfigError, match="max_model_len 2049 .* 2048"):
        choose_model_len(ModelOptions(max_model_len=2049), SPEC)


def test_defaults_by_device() -> None:
    assert choose_step_tokens(SchedulerOptions(), "cpu") < choose_step_tokens(SchedulerOptions(), "cuda")
    assert choose_step_tokens(SchedulerOptions(max_num_batched_tokens=33), "cuda") == 33
    assert choose_target_itl(SchedulerOptions(), "cpu") is None
    assert choose_target_itl(SchedulerOptions(target_itl_ms=20), "cpu") == 0.02
    assert choose_target_itl(SchedulerOptions(), "cuda") == 0.05
    assert (choose_overlap(SchedulerOptions(), "cpu"), choose_overlap(SchedulerOptions(), "cuda")) == (False, True)
    assert choose_overlap(SchedulerOptions(disable_overlap_schedule=False), "cpu")
    assert not choose_overlap(SchedulerOptions(disable_overlap_schedule=True), "cuda")
    assert choose_page_size(CacheOptions(page_size=1)) == 1


def num_pages(free_bytes: int, most_tokens: int = 10**9) -> int:
    return choose_num_pages(free_bytes, 1000, 16, max_model_len=160, most_tokens=most_tokens)


def test_pages_fill_the_memory_but_are_no_more_than_useful() -> None:
    assert num_pages(50_999) == 50
    assert num_pages(50_999, most_tokens=321) == 21


def test_memory_for_less_than_one_full_request_is_refused_with_what_to_do() -> None:
    assert num_pages(10_000) == 10
    with pytest.raises(ConfigError, match="--max-model-len.*--num-pages"):
        num_pages(9_999)


@pytest.mark.parametrize(("page_size", "max_model_len", "least"), [(16, 8192, 8), (1, 8192, 128), (16, 40, 3)])
def test_a_pool_in_which_not_even_a_short_chat_fits_is_refused(page_size: int, max_model_len: int, least: int) -> None:
    check_num_pages(CacheOptions(), page_size, max_model_len)
    check_num_pages(CacheOptions(num_pages=least), page_size, max_model_len)
    for number in (1, least - 1):
        with pytest.raises(ConfigError, match=f"num_pages {number} .* --num-pages {least} or more"):
            check_num_pages(CacheOptions(num_pages=number), page_size, max_model_len)


def test_a_large_gpu_runs_more_requests_at_once_unless_told_otherwise() -> None:
    assert choose_max_num_seqs(SchedulerOptions(), 80 * GIB) > choose_max_num_seqs(SchedulerOptions(), None)
    assert choose_max_num_seqs(SchedulerOptions(), 24 * GIB) == choose_max_num_seqs(SchedulerOptions(), None)
    assert choose_max_num_seqs(SchedulerOptions(max_num_seqs=3), 80 * GIB) == 3


def test_cpu_cache_leaves_most_of_the_memory_alone() -> None:
    assert 0 < cpu_kv_bytes(2 * GIB) < GIB
    assert cpu_kv_bytes(1000 * GIB) < 10 * GIB


def test_cuda_cache_gets_what_weights_and_the_largest_step_leave() -> None:
    assert cuda_kv_bytes(100 * GIB, 20 * GIB, 5 * GIB, 0.9) == 65 * GIB
    assert cuda_kv_bytes(100 * GIB, 90 * GIB, 5 * GIB, 0.9) == 0


def test_the_host_has_cores_and_memory() -> None:
    assert usable_cores() >= 1
    assert available_memory() > 0


@pytest.mark.parametrize(
    ("limit_file", "usage_file", "idle_cache"),
    [
        ("memory.max", "memory.current", "anon 5\ninactive_file 300\nactive_file 7\n"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 1\ntotal_inactive_file 300\n"),
    ],
)
def test_files_that_a_container_has_read_leave_room_in_it(
    limit_file: str, usage_file: str, idle_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    for group in (tmp_path, tmp_path / "memory"):  # whichever version this machine has
        group.mkdir(exist_ok=True)
        for name, text in ((limit_file, "1000\n"), (usage_file, "900\n"), ("memory.stat", idle_cache)):
            (group / name).write_text(text)
    assert available_memory() == 400
