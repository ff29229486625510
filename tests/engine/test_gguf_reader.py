from pathlib import Path

import gguf
import numpy as np
import pytest

from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import GGUFFile, read_gguf
from radixserve.engine.model_config import spec_from_gguf
from radixserve.engine.model_files import resolve_model


def write_small(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 500_000.0)
    writer.add_bool("flag", True)
    writer.add_array("words", ["alpha", "", "žluťoučký 🙂"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.ones((2, 5), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_of_a_written_file(tmp_path):
    file = read_gguf(write_small(tmp_path / "m.gguf"))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["llama.rope.freq_base"] == 500_000.0
    assert file.metadata["flag"] is True
    assert file.metadata["words"] == ["alpha", "", "žluťoučký 🙂"]
    assert file.metadata["numbers"].tolist() == [1, -2, 3]
    assert file.tensors["a.weight"].shape == (3, 4)
    assert file.raw("a.weight").view(np.float32).tolist() == list(range(12))
    assert file.raw("b.weight").view(np.float16).tolist() == [1.0] * 10


def test_agrees_with_the_gguf_package_on_the_default_model():
    path = resolve_model("smollm2-135m-instruct").gguf
    assert path is not None
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(reversed(tensor.shape.tolist()))
        assert (own.offset, own.num_bytes, own.quantization) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type,
        )
    assert len(ours.tensors) == len(theirs.tensors)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert set(keys) == set(ours.metadata)
    for key in keys:
        expected, own_value = theirs.fields[key].contents(), ours.metadata[key]
        assert (list(own_value) if isinstance(expected, list) else own_value) == expected


def test_a_file_cut_inside_the_tensor_data_is_called_truncated(tmp_path):
    path = write_small(tmp_path / "m.gguf")
    data = path.read_bytes()
    last = max(read_gguf(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(data[: last.offset + last.num_bytes - 1])
    with pytest.raises(ModelError, match="truncated"):
        read_gguf(path)


def test_every_cut_inside_the_header_is_a_model_error(tmp_path):
    path = write_small(tmp_path / "m.gguf")
    data = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    for size in range(header):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError):
            read_gguf(path)


@pytest.mark.parametrize("position", range(4, 24, 4))
def test_absurd_counts_are_a_model_error(tmp_path, position):
    path = write_small(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[position : position + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(ModelError):
        read_gguf(path)


def test_parts_of_a_split_model_are_refused_with_the_remedy(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="llama-gguf-split"):
        read_gguf(tmp_path / "m.gguf")


def test_a_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("key", ["general.alignment", "split.count"])
def test_a_text_in_the_place_of_a_number_is_a_model_error(key, tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string(key, "many")
    writer.add_tensor("a", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="model.gguf"):
        read_gguf(path)


@pytest.mark.parametrize("key", ["general.file_type", "tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id"])
def test_metadata_of_a_wrong_type_is_a_model_error(key):
    wrong = GGUFFile(Path("model.gguf"), {"general.architecture": "llama", key: np.array([1, 2])}, {})
    with pytest.raises(ModelError, match="model.gguf has metadata of a wrong type"):
        spec_from_gguf(wrong)
