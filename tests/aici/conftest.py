"""A byte-level tokenizer on disk, and control runtimes that clean up even if a test fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aici.llm_side import Llm

#: Tokens: id i is byte i, then two merges, then the special ones.
HE, LL, EOS, BOS = 256, 257, 258, 259
VOCAB_SIZE = 260


def _byte_names() -> list[str]:
    """Return the printable character of each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {}
    extra = 0
    for byte in range(256):
        if byte in plain:
            names[byte] = chr(byte)
        else:
            names[byte] = chr(256 + extra)
            extra += 1
    return [names[byte] for byte in range(256)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = _byte_names()
    vocab = {name: index for index, name in enumerate(names)} | {"he": HE, "ll": LL}
    special = [{"id": EOS, "content": "</s>"}, {"id": BOS, "content": "<s>"}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data = {
        "version": "1.0",
        "added_tokens": [{**item, **flags} for item in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["h e", "l l"], "byte_fallback": False},
    }
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a module store, so that modules are compiled once for the whole test session."""
    return tmp_path_factory.mktemp("store")


Start = Callable[..., Llm]

#: An engine that can do everything and waits long enough for a busy machine.
CAPABLE = ("--cap-fork", "--cap-backtrack", "--cap-ff-tokens", "--wasm-max-step-time", "5000")
PATIENT = ("--wasm-max-pre-step-time", "5000", "--wasm-max-step-time", "5000")


@pytest.fixture
def start(tokenizer: Path, store: Path) -> Iterator[Start]:
    """Yield a function that starts runtimes, which end with the test."""
    started: list[Llm] = []

    def make(*args: str, **options: object) -> Llm:
        llm = Llm(tokenizer, options.pop("store", store), *args, **options)  # type: ignore[arg-type]
        started.append(llm)
        return llm

    yield make
    for llm in started:
        llm.close()


@pytest.fixture(scope="module")
def llm2(tokenizer: Path, store: Path) -> Iterator[Llm]:
    """Yield a runtime for an engine of dialect 2. All tests of a module share it, like users of a server."""
    llm = Llm(tokenizer, store, *CAPABLE)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def llm1(tokenizer: Path, store: Path) -> Iterator[Llm]:
    """Yield a runtime for an engine of dialect 1, which all tests of a module share."""
    llm = Llm(tokenizer, store, *PATIENT)
    yield llm
    llm.close()
