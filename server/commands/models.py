"""``radixserve models``: which models are on this machine, and what serving one takes. Loads no weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import safe_open

from radixserve.configs.schema import DEFAULT_MODEL
from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import read_gguf
from radixserve.engine.host import available_memory
from radixserve.engine.model_config import load_spec
from radixserve.engine.model_files import ModelFiles, is_hub_id, resolve_model
from radixserve.engine.model_spec import ModelSpec
from radixserve.server.commands.gpus import Gpu, find_gpus
from radixserve.server.commands.parser import Parser

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def build_parser() -> Parser:
    parser = Parser(
        prog="radixserve models",
        usage="radixserve models [NAME]",
        description="List the models on this machine, or inspect one.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="folder, .gguf file, or a name of the list")
    return parser


def run(arguments: Sequence[str]) -> int:
    flags = build_parser().parse_args(arguments)
    print("\n".join(_list() if flags.name is None else _inspect(_local_files(flags.name))))
    return 0


# ---- the list ----


def _list() -> Iterator[str]:
    found = [*_default_model(), *_cached_models()]
    width = max((len(name) for name, _ in found), default=0)
    for name, location in found:
        try:
            files = resolve_model(str(location))
            facts = f"{load_spec(files).family:<9} {_size(_weight_bytes(files)):>10}  {location}"
        except ModelError as error:
            facts = f"(cannot be served: {error})"
        yield f"{name:<{width}}  {facts}"
    if not found:
        yield "no models here; `radixserve serve owner/name` downloads one from Hugging Face"


def _default_model() -> list[tuple[str, Path]]:
    try:
        files = resolve_model(DEFAULT_MODEL)
    except ModelError:
        return []
    assert files.gguf is not None
    return [(DEFAULT_MODEL, files.gguf)]


def _cached_models() -> list[tuple[str, Path]]:
    """Models in the Hugging Face cache, at the revision that was used last; sorted by name."""
    from huggingface_hub import scan_cache_dir  # slow to import, and not needed for a path
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [repo for repo in repos if repo.repo_type == "model" and repo.revisions]
    newest = ((repo.repo_id, max(repo.revisions, key=lambda revision: revision.last_modified)) for repo in models)
    return sorted((name, revision.snapshot_path) for name, revision in newest)


# ---- one model ----


def _local_files(name: str) -> ModelFiles:
    """As ``resolve_model``, but nothing is downloaded. Raises ``ModelError``."""
    if name == DEFAULT_MODEL or Path(name).expanduser().exists():
        return resolve_model(name)
    cached = dict(_cached_models())
    if name not in cached:
        how = f"`radixserve serve {name}` downloads it" if is_hub_id(name) else "`radixserve models` lists what is"
        raise ModelError(f"model {name!r} is not on this machine; {how}")
    return resolve_model(str(cached[name]))


def _inspect(files: ModelFiles) -> Iterator[str]:
    spec = load_spec(files)
    heads = f"{spec.num_heads} heads of {spec.head_dim}, {spec.num_kv_heads} for keys and values"
    yield f"model         {files.name}"
    yield f"architecture  {spec.family}, {spec.num_layers} layers, {heads}"
    yield f"parameters    {_num_parameters(files) / 1e6:,.1f} million"
    yield f"weights       {_size(_weight_bytes(files))} on disk{_format(spec, files)}, made for {spec.dtype}"
    yield f"context       {spec.max_position} tokens, vocabulary {spec.vocab_size}"
    for dtype in ("fp8", "bfloat16", "float32"):
        yield f"KV cache      {_kv_bytes_per_token(spec, dtype):,} bytes a token in {dtype}"
    yield from _fits(spec, files, find_gpus())


def _format(spec: ModelSpec, files: ModelFiles) -> str:
    if files.gguf:
        return ", GGUF"
    return f", {spec.quantization.description}" if spec.quantization else ""


def _fits(spec: ModelSpec, files: ModelFiles, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Tokens of KV cache in bfloat16 that the free memory has room for beside the weights: these are about as large as
    on disk on a CPU, and on a GPU if they are quantized safetensors; else they are in bfloat16 there."""
    stored_bytes = _weight_bytes(files)
    on_gpu = stored_bytes if spec.quantization else _num_parameters(files) * _BYTES["bfloat16"]
    places = [(f"GPU {gpu.index}, {gpu.name}", gpu.free_bytes, on_gpu) for gpu in gpus]
    for place, free_bytes, weight_bytes in [*places, ("CPU", available_memory(), stored_bytes)]:
        tokens = max(0, (free_bytes - weight_bytes) // _kv_bytes_per_token(spec, "bfloat16"))
        verdict = (
            f"{tokens:,} tokens of KV cache: {tokens / spec.max_position:,.1f} requests of full length"
            if tokens >= spec.max_position
            else f"{tokens:,} tokens of KV cache: give --max-model-len {tokens // 16 * 16}"
            if tokens >= 16
            else "the weights do not fit"
        )
        yield f"fits on       {place}, {_size(free_bytes)} free: {verdict}"


def _kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * _BYTES[dtype]


def _num_parameters(files: ModelFiles) -> int:
    if files.gguf is not None:
        return sum(math.prod(tensor.shape) for tensor in read_gguf(files.gguf).tensors.values())
    total = 0
    for path in files.weights:
        with safe_open(path, framework="np") as file:
            total += sum(_parameters_in(name, file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def _parameters_in(name: str, shape: list[int]) -> int:
    """Of a tensor of safetensors. Of a quantized matrix only the weights count, eight in each integer of 4-bit ones."""
    part = name.rpartition(".")[2]
    if part in ("scales", "qzeros", "g_idx", "input_scale") or part.startswith("weight_"):
        return 8 * math.prod(shape) if part == "weight_packed" else 0
    return math.prod(shape) * (8 if part == "qweight" else 1)


def _weight_bytes(files: ModelFiles) -> int:
    return sum(path.stat().st_size for path in ([files.gguf] if files.gguf else files.weights))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
