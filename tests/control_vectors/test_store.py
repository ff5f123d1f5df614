"""The named control vectors of a model, which may change while requests use them."""

from __future__ import annotations

import pytest
import torch

from bridle.control_vectors import ControlVectors
from bridle.control_vectors.store import MAX_VECTORS
from bridle.errors import InvalidRequest, UnknownControlVector
from tests.control_vectors.kit import directions


def store(num_layers: int = 4, hidden: int = 8) -> ControlVectors:
    return ControlVectors(num_layers, hidden, torch.float32, torch.device("cpu"))


def test_a_mix_is_the_scaled_sum() -> None:
    vectors, one, other = store(), directions(4, 8, 1), directions(3, 8, 2)
    vectors.put("one", one)
    vectors.put("other", other)
    keys = vectors.open(["one", "other"])
    mixed = vectors.mixed(((keys["one"], 0.5), (keys["other"], -2.0)))
    assert torch.equal(mixed[1], one[1] * 0.5 + other[1] * -2.0)
    assert torch.equal(mixed[3], one[3] * 0.5), "a layer that only one has"


def test_a_request_keeps_its_version() -> None:
    vectors, old, new = store(), directions(4, 8, 1), directions(4, 8, 2)
    vectors.put("polite", old)
    (before,) = vectors.open(["polite"]).values()
    vectors.put("polite", new)
    (after,) = vectors.open(["polite"]).values()
    assert before != after
    assert torch.equal(vectors.mixed(((before, 1.0),))[1], old[1])
    assert torch.equal(vectors.mixed(((after, 1.0),))[1], new[1])
    assert vectors.get("polite").num_users == 1
    vectors.leave([before])
    assert before not in vectors and after in vectors


def test_a_removed_vector_stays_until_its_last_user_is_done() -> None:
    vectors = store()
    vectors.put("polite", directions(4, 8))
    keys = vectors.open(["polite"])
    vectors.remove("polite")
    with pytest.raises(UnknownControlVector, match="got 'polite'; known are none"):
        vectors.check(["polite"])
    assert keys["polite"] in vectors
    vectors.leave(keys.values())
    assert keys["polite"] not in vectors


def test_equal_directions_keep_the_key() -> None:
    """A vector with equal directions keeps its key, so that the KV of earlier requests is found."""
    vectors = store()
    vectors.put("polite", directions(4, 8))
    before = vectors.open(["polite"])
    vectors.put("polite", directions(4, 8))
    assert vectors.open(["polite"]) == before


def test_a_failed_open_holds_nothing() -> None:
    vectors = store()
    vectors.put("polite", directions(4, 8))
    with pytest.raises(UnknownControlVector):
        vectors.open(["polite", "rude"])
    assert vectors.get("polite").num_users == 0


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 97, "a/b"])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(InvalidRequest, match="control vector name: got"):
        store().add(name, "/nowhere")


def test_a_vector_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"directions of \[16\] values; this model needs 8 \(its hidden size\)"):
        store().put("polite", directions(4, 16), "a.gguf")
    with pytest.raises(InvalidRequest, match="for layers 1 to 3"):
        store().put("polite", {9: torch.ones(8)}, "a.gguf")


def test_vectors_are_bounded() -> None:
    vectors = store()
    for number in range(MAX_VECTORS):
        vectors.put(f"v{number}", directions(2, 8))
    with pytest.raises(InvalidRequest, match="256 are loaded, which is the maximum; remove one first"):
        vectors.put("more", directions(2, 8))
    vectors.put("v7", directions(2, 8, 1))
