"""Tests that failed loads of adapters are remembered, up to a number, until their files change or time has passed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridle.errors import AdapterRefused, ModelUnavailable
from bridle.lora import negative_cache
from bridle.lora.negative_cache import CachedFailure, Failures, stamp_of


def refused(folder: Path | None, until: float = 30.0) -> CachedFailure:
    try:
        raise AdapterRefused("damaged", "source")
    except AdapterRefused as error:
        return CachedFailure(error, folder, stamp_of(folder), until)


def test_it_holds_until_its_time_is_up() -> None:
    known = Failures()
    known.note("a", refused(None))
    assert known.find("a", 29.9) is not None and known.find("b", 0.0) is None
    assert known.find("a", 30.0) is None
    assert not len(known)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_it_holds_until_a_file_is_another(name: str, tmp_path: Path) -> None:
    failure = refused(tmp_path)
    assert failure.holds(0.0)
    (tmp_path / name).write_text("a")  # it came
    assert not failure.holds(0.0)
    failure = refused(tmp_path)
    assert failure.holds(0.0)
    os.utime(tmp_path / name, ns=(5, 5))  # was written again
    assert not failure.holds(0.0)
    failure = refused(tmp_path)
    (tmp_path / "README.md").write_text("nothing that counts")
    assert failure.holds(0.0)
    (tmp_path / name).unlink()
    assert not failure.holds(0.0)


def test_everybody_gets_an_error_of_their_own() -> None:
    failure = refused(None)
    first, second = failure.again(), failure.again()
    assert first is not second and isinstance(first, AdapterRefused)
    assert (str(first), first.param) == ("damaged", "source")
    assert failure.error.__traceback__ is None and failure.error.__context__ is None  # frames keep what was read
    again = CachedFailure(ModelUnavailable("later", 7.0), None, (), 1.0).again()
    assert isinstance(again, ModelUnavailable) and again.retry_after == 7.0


def test_there_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negative_cache, "MAX_FAILURES", 3)
    known = Failures()
    for name in ("a", "b", "c", "a", "d"):
        known.note(name, refused(None))
    assert [name for name in "abcd" if known.find(name, 0.0)] == ["a", "c", "d"]
    known.forget("a")
    known.forget("nobody")
    assert known.find("a", 0.0) is None
