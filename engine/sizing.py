"""What "auto" means: pure functions from the options, the model and the machine to sizes. Errors name the remedy."""

import torch

from radixserve.configs.schema import CacheOptions, ModelOptions, RunnerOptions, SchedulerOptions
from radixserve.engine.errors import ConfigError
from radixserve.engine.model_spec import ModelSpec
from radixserve.kvcache.mha import pages_that_fit

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PAGE_TOKENS = 16
# A step must be long enough to be efficient and short enough not to keep decodes waiting.
_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
# As many streams as share a step of a large GPU well (benchmarks/RESULTS.md, W4). Of a large vocabulary each row takes
# 2.6 MB, for logits and what sampling rules make of them, so a GPU with less memory than this gets fewer.
_MAX_NUM_SEQS, _MAX_NUM_SEQS_LARGE_GPU = 256, 1024
_LARGE_GPU_BYTES = 60 << 30
# A CPU would compute prompts in small, dear pieces.
_TARGET_ITL_MS = {"cpu": None, "cuda": 50.0}
# A pool of fewer tokens serves nobody: a chat template alone takes some dozens.
_MIN_POOL_TOKENS = 128
# On the CPU the KV cache shares memory with everything else.
_CPU_MEMORY_SHARE = 0.4
_CPU_KV_BYTES = 4 << 30


def choose_dtype(requested: str, checkpoint: str, device: str, has_native_bf16: bool) -> torch.dtype:
    """Type of weights and KV. "auto": on CUDA the checkpoint's own, but not the slow fp32; on the CPU what it computes
    natively."""
    if requested != "auto":
        return _DTYPES[requested]
    if device == "cpu":
        return torch.bfloat16 if has_native_bf16 else torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def wants_native(options: RunnerOptions, dtype: str, device: str) -> bool:
    """Whether the native CPU kernels are what the options ask for. A type of weights and KV that is asked for by name
    is what torch computes with; beside ``cpu_weights`` it is that of the KV cache."""
    if device != "cpu" or options.cpu_weights == "fp32":
        return False
    return options.cpu_weights != "auto" or dtype == "auto"


def choose_kv_dtype(options: CacheOptions, dtype: torch.dtype) -> torch.dtype:
    """Beside activations of ``dtype``. Raises ``ConfigError`` for types that do not go together."""
    if options.kv_cache_dtype == "auto":
        return dtype
    if dtype == torch.float16:  # weights that are made smaller by a factor lose bits there
        raise ConfigError("kv_cache_dtype fp8 does not go with dtype float16; use --dtype bfloat16")
    return torch.float8_e4m3fn


def choose_native_kv_dtype(options: CacheOptions, requested: str) -> torch.dtype:
    """Raises ``ConfigError`` for what the native kernels do not store."""
    if options.kv_cache_dtype == "fp8":
        raise ConfigError(
            "kv_cache_dtype fp8 does not go with the native CPU kernels; use --cpu-weights fp32, which is much slower, "
            "or leave --kv-cache-dtype away"
        )
    if requested == "float16":
        raise ConfigError("dtype float16 does not go with --cpu-weights; use --dtype bfloat16 or float32")
    return torch.bfloat16 if requested == "auto" else _DTYPES[requested]


def choose_torch_dtype(options: RunnerOptions, dtype: str, device: str) -> str:
    """What is asked for where the native kernels are not used: weights and KV have one type then. Raises
    ``ConfigError`` when two are asked for."""
    weights = {"fp32": "float32", "bf16": "bfloat16"}.get(options.cpu_weights, dtype) if device == "cpu" else dtype
    if dtype not in ("auto", weights):
        raise ConfigError(
            f"dtype {dtype} does not go with --cpu-weights {options.cpu_weights}, where the native kernels are not "
            f"used; leave out one of them"
        )
    return weights


def choose_model_len(options: ModelOptions, spec: ModelSpec) -> int:
    """Context length in tokens. Raises ``ConfigError`` when more is asked for than the model knows positions."""
    if options.max_model_len is None:
        return spec.max_position
    if options.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len {options.max_model_len} is more than the {spec.max_position} positions of the model; "
            f"lower --max-model-len"
        )
    return options.max_model_len


def choose_page_size(options: CacheOptions) -> int:
    return options.page_size or _PAGE_TOKENS


def choose_step_tokens(options: SchedulerOptions, device: str) -> int:
    """Token budget of a step."""
    return options.max_num_batched_tokens or _STEP_TOKENS[device]


def choose_max_num_seqs(options: SchedulerOptions, gpu_bytes: int | None) -> int:
    """Rows: requests that run at the same time. ``gpu_bytes``: memory of the GPU; None on a CPU."""
    is_large = gpu_bytes is not None and gpu_bytes >= _LARGE_GPU_BYTES
    return options.max_num_seqs or (_MAX_NUM_SEQS_LARGE_GPU if is_large else _MAX_NUM_SEQS)


def choose_target_itl(options: SchedulerOptions, device: str) -> float | None:
    """Seconds that a step should take beside streams, or None for no limit."""
    target_ms = options.target_itl_ms or _TARGET_ITL_MS[device]
    return None if target_ms is None else target_ms / 1e3


def choose_overlap(options: SchedulerOptions, device: str) -> bool:
    """Planning a step while the last one runs pays where a device computes, not where the CPU itself does."""
    disabled = options.disable_overlap_schedule
    return device == "cuda" if disabled is None else not disabled


def check_num_pages(options: CacheOptions, page_size: int, max_model_len: int) -> None:
    """Raises ``ConfigError`` when the pages asked for are too few for even a short request."""
    least = -(-min(_MIN_POOL_TOKENS, max_model_len) // page_size)
    if options.num_pages is not None and options.num_pages < least:
        raise ConfigError(
            f"num_pages {options.num_pages} is a KV cache of {options.num_pages * page_size} tokens, too few for even "
            f"a short chat; use --num-pages {least} or more, or leave it out to fill the free memory"
        )


def choose_num_pages(free_bytes: int, page_bytes: int, page_size: int, max_model_len: int, most_tokens: int) -> int:
    """KV pages that fit in ``free_bytes``, and no more than ``most_tokens`` need.

    Raises ``ConfigError`` when not even one request of full length fits.
    """
    useful = -(-most_tokens // page_size)
    num_pages = min(useful, pages_that_fit(free_bytes, page_bytes))
    if num_pages * page_size >= max_model_len:
        return num_pages
    needed_bytes = max_model_len * page_bytes // page_size
    raise ConfigError(
        f"memory is short: {free_bytes / 2**30:.2f} GiB are free for the KV cache, but one request of {max_model_len} "
        f"tokens needs {needed_bytes / 2**30:.2f} GiB. Lower --max-model-len, raise --gpu-memory-utilization, or set "
        f"--num-pages to serve shorter requests only"
    )


def cpu_kv_bytes(available_bytes: int) -> int:
    """Share of the memory that is free after loading; untouched pages cost nothing."""
    return min(int(available_bytes * _CPU_MEMORY_SHARE), _CPU_KV_BYTES)


def cuda_kv_bytes(total_bytes: int, used_bytes: int, step_bytes: int, utilization: float) -> int:
    """What ``utilization`` of the device leaves beside what is in use now (weights and others) and the measured peak
    of the largest step."""
    return max(0, int(total_bytes * utilization) - used_bytes - step_bytes)
