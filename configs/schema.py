"""Every option of the server, once: names, types, defaults, help. One class a group, one frozen ``ServeConfig`` of all.

A function that needs only some options takes their group (``CacheOptions``), and any ``ServeConfig`` is one.
Names follow vLLM where they mean the same, SGLang where vLLM has none.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    model_validator,
)

DEFAULT_MODEL = "smollm2-135m-instruct"

LogFormat = Literal["text", "json"]
ToolCallParser = Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "phi", "json"]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "seed_oss"]

_WITH_SECRETS = {"secrets": True}


def _dump_secret(secret: SecretStr, info: SerializationInfo) -> str:
    return secret.get_secret_value() if info.context == _WITH_SECRETS else str(secret)


# Masked in repr, logs and dumps; compare ``get_secret_value()``.
Secret = Annotated[SecretStr, PlainSerializer(_dump_secret, when_used="json")]


def _check_origin(origin: str) -> str:
    """Browsers send exactly this form; any other would match none and be no help to whoever wrote it."""
    if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
        raise ValueError("it should be an origin such as https://chat.example.org:8443, with nothing behind it, or *")
    return origin


Origin = Annotated[str, AfterValidator(_check_origin)]


class OptionGroup(BaseModel):
    """Options that belong together; the docstring of a group is its heading in help and documentation."""

    # JSON, in which children get their options, has no infinity.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def title(cls) -> str:
        return (cls.__doc__ or "").strip()


class ModelOptions(OptionGroup):
    """Model"""

    model: str = Field(DEFAULT_MODEL, description="Folder, .gguf file, Hugging Face id, or alias of the default model")
    served_model_name: tuple[str, ...] = Field((), description="Names the API answers to (default: the model's)")
    tokenizer: str | None = Field(None, description="Folder or file of another tokenizer than the model's own")
    chat_template: str | None = Field(None, description="File with a Jinja chat template, instead of the model's own")
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: sampling defaults come from the model's generation_config.json"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Context length in tokens, prompt and answer (default: the model's own)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Type of weights and KV")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        "auto", description="Weights to read where a folder has both kinds; dummy: random ones, for benchmarks"
    )
    quantization: Literal["auto", "fp8"] = Field(
        "auto", description="fp8: the matrices of an unquantized checkpoint become 8 bits wide (auto: as stored)"
    )
    seed: int = Field(0, description="Seed of random weights and of requests that bring none")


class RunnerOptions(OptionGroup):
    """Runner"""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs")
    attention_backend: Literal["auto", "torch", "flashinfer", "triton"] = Field("auto", description="Attention kernels")
    moe_backend: Literal["auto", "torch"] = Field(
        "auto", description="Mixtures of experts on a GPU; torch: plain, without CUDA graphs"
    )
    shared_prefix_attention: Literal["auto", "off"] = Field(
        "auto", description="auto: decodes that begin with the same pages read those once a step, when that pays"
    )
    deterministic: bool = Field(
        False, description="Greedy and seeded requests get the same tokens in any batch and cache state; slower"
    )
    enforce_eager: bool = Field(False, description="Run all steps without CUDA graphs")
    profile: str | None = Field(None, description="Folder for a torch trace of the engine's steps 100 to 149")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory for weights and KV")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share each layer (see docs/tensor_parallel.md)")
    disable_custom_all_reduce: bool = Field(False, description="Leave all sums over these GPUs to NCCL")
    cpu_weights: Literal["auto", "int4", "int8", "bf16", "fp32"] = Field(
        "auto", description="Weights on a CPU; auto: as precise as the checkpoint's (see docs/performance.md)"
    )
    # More only starves the machine of processes: a hundred thousand keep everybody on it from starting one.
    cpu_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of CPU kernels (default: the cores it may use)"
    )


class CacheOptions(OptionGroup):
    """KV cache"""

    page_size: int | None = Field(None, ge=1, le=64, description="Tokens a page holds (default: by device)")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="fp8: keys and values in 8 bits, so that twice the tokens fit (auto: as --dtype)"
    )
    num_pages: int | None = Field(None, ge=1, description="KV pages (default: sized from free memory)")
    radix_eviction_policy: Literal["lru", "lfu", "fifo"] = Field(
        "lru", description="Which cached prefix goes first: least recently used, least often used, or oldest"
    )
    disable_radix_cache: bool = Field(False, description="Keep no prefixes: each request computes its whole prompt")


class SchedulerOptions(OptionGroup):
    """Scheduler"""

    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Requests that run at the same time (default: 1024 on a GPU of 60 GiB or more, else 256)",
    )
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Token budget of a step (default: by device)")
    target_itl_ms: float | None = Field(
        None, gt=0, description="Prompts beside streams get what fits into steps of so long (default: by device)"
    )
    max_num_queued_reqs: int = Field(1024, ge=1, description="Requests that may wait; one more is answered 429")
    max_num_queued_tokens: int = Field(
        4_194_304, ge=1, description="Prompt tokens that may wait, all requests together; more are answered 429"
    )
    max_queue_time: float = Field(
        600.0, gt=0, description="Seconds a request may wait for its first step; then it is answered 503"
    )
    schedule_policy: Literal["fcfs", "lpm", "priority"] = Field("fcfs", description="Who is admitted next")
    disable_overlap_schedule: bool | None = Field(
        None, description="Plan a step only after the last one's tokens are known (default: by device)"
    )


class ServerOptions(OptionGroup):
    """Server"""

    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    api_workers: int | None = Field(
        None, ge=1, description="Frontend processes behind the port (default: one, or up to four beside a GPU)"
    )
    api_key: tuple[Secret, ...] = Field((), description="Keys that clients must send as a bearer token")
    admin_api_key: tuple[Secret, ...] = Field(
        (), description="Keys for all routes; with one, those of operators take no other (docs/security.md)"
    )
    api_key_file: str | None = Field(
        None, description="File of more keys, a line each: KEY, or KEY NAME, or KEY NAME WEIGHT"
    )
    cors_allow_origins: tuple[Origin, ...] = Field((), description="Origins that browsers may call from; * for all")
    max_body_mb: float = Field(32.0, gt=0, description="Largest request body, in MiB")
    max_connections: int = Field(16_384, ge=1, description="Open connections of a worker; one more is answered 503")
    request_timeout: float = Field(60.0, gt=0, description="Seconds a client may take to send a request; then 408")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that running requests get after SIGTERM")
    health_timeout: float = Field(10.0, gt=0, description="Seconds of engine silence after which /health says 503")
    # The frontend looks each second: less than two would end engines that are a moment late.
    watchdog_timeout: float = Field(
        300.0, ge=2, description="Seconds of engine silence after which it is killed and started again"
    )
    stream_interval: int = Field(1, ge=1, description="Tokens between two streamed chunks")
    tool_call_parser: ToolCallParser = Field(
        "auto", description="How the model writes tool calls (auto: by its chat template)"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="How the model marks its reasoning (auto: by its chat template)"
    )
    page: Literal["auto", "full", "off"] = Field(
        "auto",
        description="The page at /; it shows texts of prompts only where they must be the reader's own, or if full",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged")
    log_format: LogFormat = Field("text", description="json: each message is an object on a line")
    log_requests: bool = Field(
        False, description="Log each request at its end, with its id, tokens and times, and each refusal; no texts"
    )

    @model_validator(mode="after")
    def _end_only_what_is_stuck(self) -> Self:
        if self.watchdog_timeout < self.health_timeout:
            raise ValueError(
                f"watchdog_timeout {self.watchdog_timeout:g} is less than health_timeout {self.health_timeout:g}: "
                f"engines that /health calls well would be ended; raise --watchdog-timeout or lower --health-timeout"
            )
        return self

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)


# In the order of help and documentation.
GROUPS: tuple[type[OptionGroup], ...] = (ModelOptions, RunnerOptions, CacheOptions, SchedulerOptions, ServerOptions)


class ServeConfig(ModelOptions, RunnerOptions, CacheOptions, SchedulerOptions, ServerOptions):
    """All options of ``radixserve serve``. Frozen: "auto" values are resolved by pure functions into new ones."""

    def to_private_json(self) -> str:
        """One line of JSON with the secrets in clear, for our own child processes only."""
        return self.model_dump_json(context=_WITH_SECRETS)


# What must not be shown, not even masked where it could be read back: the mask would be a key that everyone knows.
SECRET_OPTIONS = frozenset(n for n, field in ServeConfig.model_fields.items() if field.annotation == tuple[Secret, ...])
