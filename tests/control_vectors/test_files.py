"""Files of control vectors: what is read, and what is refused with the reason."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bridle.control_vectors import read_vector, write_vector
from bridle.errors import InvalidRequest
from tests.control_vectors.kit import directions


def test_a_gguf_file_gives_back_what_was_written(tmp_path: Path) -> None:
    made = directions(5, 24)
    write_vector(tmp_path / "a.gguf", made, "llama")
    found = read_vector(tmp_path / "a.gguf")
    assert found.keys() == made.keys()
    assert all(torch.equal(found[layer], made[layer]) for layer in made)


def test_llama_cpp_s_names_are_in_the_file(tmp_path: Path) -> None:
    """The file contains the architecture and the float32 tensors that llama.cpp looks for."""
    from gguf import GGMLQuantizationType, GGUFReader

    write_vector(tmp_path / "a.gguf", directions(3, 8), "qwen2")
    reader: Any = GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.architecture"].contents() == "controlvector"
    assert reader.fields["controlvector.model_hint"].contents() == "qwen2"
    assert reader.fields["controlvector.layer_count"].contents() == 2
    assert [(tensor.name, tensor.tensor_type) for tensor in reader.tensors] == [
        ("direction.1", GGMLQuantizationType.F32),
        ("direction.2", GGMLQuantizationType.F32),
    ]


def test_safetensors_are_read(tmp_path: Path) -> None:
    made = {layer: values.half() for layer, values in directions(4, 8).items()}
    save_file({f"direction.{layer}": values for layer, values in made.items()}, tmp_path / "a.safetensors")
    found = read_vector(tmp_path / "a.safetensors")
    assert list(found) == [1, 2, 3]
    assert all(torch.equal(found[layer], made[layer].float()) for layer in made)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"direction.0": torch.ones(8)}, "tensor 'direction.0'; names must be direction.N, for a layer N from 1"),
        ({"direction.x": torch.ones(8)}, "tensor 'direction.x'"),
        ({"weight": torch.ones(8)}, "tensor 'weight'"),
        ({"direction.1": torch.ones(2, 4)}, "rows of the same length"),
        ({"direction.1": torch.ones(8), "direction.2": torch.ones(4)}, "rows of the same length"),
        ({"direction.1": torch.tensor([1.0, float("nan")])}, "has values that are not finite"),
        ({}, "rows of the same length"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(InvalidRequest, match="control vector: ") as caught:
        read_vector(tmp_path / "a.safetensors")
    assert reason in str(caught.value) and caught.value.param == "source"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be a GGUF or safetensors file"):
        read_vector(tmp_path)


@given(data=st.binary(max_size=200), ending=st.sampled_from([".gguf", ".safetensors"]), magic=st.booleans())
def test_any_bytes_are_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, ending: str, magic: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / f"a{ending}"
    path.write_bytes((b"GGUF" + struct.pack("<I", 3) if magic else b"") + data)
    with pytest.raises(InvalidRequest):
        read_vector(path)
