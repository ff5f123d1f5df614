"""Tests of the choice of a kernel object for this processor, and of the fallback without one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from bridle.cpu_kernels import library
from bridle.cpu_kernels.isa_targets import MANIFEST, SOURCES, TARGETS
from bridle.cpu_kernels.kernels import Kernels
from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.errors import InternalError
from bridle.model.quantize import Int8Linear


@pytest.fixture
def _anew() -> Iterator[None]:
    library.choice.cache_clear()
    yield
    library.choice.cache_clear()


def test_best_fit_comes_first() -> None:
    all_of = frozenset().union(*(target.features for target in TARGETS))
    names = [target.name for target in library.fitting("Linux", "x86_64", all_of)]
    assert names == ["avx512-vnni", "avx-vnni", "avx2"]
    assert [t.name for t in library.fitting("Linux", "x86_64", {"avx2", "fma", "f16c"})] == ["avx2"]
    assert [t.name for t in library.fitting("Linux", "aarch64", all_of)] == ["neon-i8mm", "neon-dotprod"]
    assert [t.name for t in library.fitting("Linux", "aarch64", {"asimd", "asimddp"})] == ["neon-dotprod"]
    assert not list(library.fitting("Linux", "x86_64", {"avx2"}))
    assert not list(library.fitting("Windows", "x86_64", all_of))


def test_shipped_objects_are_those_of_the_manifest() -> None:
    hashes = msgspec.json.decode(MANIFEST.read_bytes(), type=dict[str, str])
    assert set(hashes) == {target.name for target in TARGETS}
    for target in TARGETS:
        assert hashlib.sha256(target.path.read_bytes()).hexdigest() == hashes[target.name]


def test_a_changed_object_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in TARGETS:
        (tmp_path / f"{target.name}.so").write_bytes(target.path.read_bytes()[:-1] + b"!")
    monkeypatch.setattr("bridle.cpu_kernels.isa_targets.OBJECTS", tmp_path)
    with pytest.raises(InternalError, match="the manifest says"):
        library.load(TARGETS[0])


@pytest.mark.usefixtures("_anew")
def test_without_an_object_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library, "cpu_features", frozenset)
    with caplog.at_level(logging.WARNING):
        assert library.kernels() is None
    assert "plain torch computes" in caplog.text
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 40)
    layer = QuantizedLinear.from_float(linear.weight, "Q8_0", linear.bias)
    assert not layer.prepare()
    rows = torch.randn(3, 64)
    torch.testing.assert_close(layer(rows), torch.nn.functional.linear(rows, layer.weight, layer.bias))
    assert Int8Linear(linear).native is None


@pytest.mark.usefixtures("_anew")
def test_the_log_says_which_object_computes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bridle.cpu_kernels.library"):
        found = library.kernels()
        library.kernels()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert told == ([] if found is None else [f"CPU kernels: {found.name}, {found.lanes} lanes"])


@pytest.mark.usefixtures("_anew")
def test_an_object_that_gives_other_numbers_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if library.kernels() is None:
        pytest.skip("no object for this machine")
    library.choice.cache_clear()
    original = Kernels.linear
    monkeypatch.setattr(Kernels, "linear", lambda self, matrix, rows: original(self, matrix, rows) * 1.001)
    with caplog.at_level(logging.WARNING):
        assert library.kernels() is None
    assert "differs from torch's" in library.choice().reason


def test_sources_name_every_kind() -> None:
    """The numbers of block types in the C source equal those in Python."""
    from bridle.cpu_kernels.packing import KINDS

    text = (SOURCES / "linear.h").read_text(encoding="utf-8")
    names = text.partition("enum {")[2].partition("NUM_KINDS")[0].replace(" ", "").strip(",").split(",")
    assert {name.lower(): number for number, name in enumerate(names)} == {k.lower(): n for k, n in KINDS.items()}


def test_packed_layers_keep_their_weight() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40)
    for form in ("Q8_0", "Q4_0"):
        layer = QuantizedLinear.from_float(linear.weight, form, linear.bias)
        before = layer.weight
        if layer.prepare():
            assert layer.prepare(), "a second time changes nothing"
            assert torch.equal(layer.weight, before)
    native, plain = Int8Linear(linear), Int8Linear(linear, is_native=False)
    assert torch.equal(native.weight, plain.weight)
    rows = torch.randn(2, 5, 96, dtype=torch.bfloat16)
    assert torch.equal(native(rows), plain(rows)) and native(rows).dtype is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_sources_give_the_shipped_bytes(target: object) -> None:
    from dev.cpu_kernels.rebuild import build

    target = next(one for one in TARGETS if one is target)
    assert build(replace(target)) == target.path.read_bytes()
