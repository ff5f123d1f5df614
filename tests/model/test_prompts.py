"""Tests of library kernels for attention of long chunks, on a CPU: the timing test that chooses one, and each kernel's
call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, varlen

from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels import paged, prompt_choice, prompts
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.paged_call import AttentionCall
from bridle.model.kernels.prompts import PromptKernel
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.sequence_state import CachedRequestState
from tests.model.attention_pool import CPU, Pool, attend

PLAIN = LayerGeometry(4, 2, 16, 16)


class TorchPaged(PagedKernel):
    """bridle's own kernel in plain torch, for the first `count` tiles of long chunks in a step."""

    def take(self, news: Tensor, count: int) -> None:
        assert self.tables is not None
        pairs = news.view(-1, 2)[:count].long()
        self.tables.view(-1)[pairs[:, 0]] = pairs[:, 1].int()

    def attend_tiles(self, call: AttentionCall, sequences: Tensor, tiles: Tensor, count: int) -> None:
        assert self._step is not None
        reference = ReferenceKernel()
        reference.begin(self._step)
        out = reference.attend(call.query, call.cache, call.options)
        for number, tile in tiles[: 2 * count].view(-1, 2).tolist():
            offset, length, *_ = sequences[5 * number :][:5].tolist()
            begin, end = offset + tile * paged.TILE, offset + min((tile + 1) * paged.TILE, length)
            assert begin < end
            call.out[begin:end] = out[begin:end]


def exact(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Return plain torch attention of a context's last tokens over all tokens up to each of them."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1).float() for part in (keys, values))
    scores = torch.einsum("lhd,chd->hlc", query.float(), keys) * options.scaling
    place = torch.arange(len(keys))
    own = place[-len(query) :, None]
    seen = (place <= own) & (own - place < (options.window or len(keys)))
    return torch.einsum("hlc,chd->lhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values).to(query.dtype)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MIN_TOKENS", 24)
    monkeypatch.setattr(paged, "MAX_SHORT", 0)
    monkeypatch.setattr(paged, "TILE", 8)
    monkeypatch.setattr(prompt_choice, "TRIALS", ((30, 30), (24, 70)))
    monkeypatch.setattr(prompt_choice, "SPEED_TRIAL", (24, 40))


def chosen(*found: PromptKernel, shape: LayerGeometry = PLAIN, times: tuple[float, ...] = ()) -> str | None:
    """Return the name of the kernel that the timing test chooses. `times` are the seconds of a library's kernel and of
    bridle's own, in turns; later runs take equally long."""
    kernel, left = TorchPaged(CPU), iter(times)

    def seconds(work: Callable[[], object]) -> float:
        work()
        return next(left, 1.0)

    best = prompt_choice.first_that_does(found, kernel, Geometry({0: shape}, 2), torch.float16, 4, seconds)
    assert kernel.prompts is None, "the trial leaves the kernel as it was"
    return None if best is None else best.name


def broken(*_call: Any) -> Tensor:
    raise RuntimeError("built for another driver")


def shifted(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention wrongly, like a kernel that aligns its causal mask with the first key instead of the last
    one."""
    return exact(query, keys[: len(query)], values[: len(query)], options)


GOOD, WINDOWS = PromptKernel("good", exact), PromptKernel("windows", exact, has_window=True)


@pytest.mark.parametrize(
    ("found", "settings", "want", "said"),
    [
        ((GOOD, WINDOWS), {}, "good", "tokens: good"),
        ((PromptKernel("broken", broken), WINDOWS), {}, "windows", "RuntimeError: built for another driver"),
        (
            (PromptKernel("shifted", shifted), GOOD),
            {},
            "good",
            "shifted is not used for the attention of prompts: 24 of 70 tokens differ by",
        ),
        ((GOOD, WINDOWS), {"times": (2.0, 1.0)}, "windows", "it takes 2000.00 ms, the own kernel 1000.00"),
        ((GOOD,), {"times": (2.0, 1.0)}, None, "good is not used"),
        ((GOOD, WINDOWS), {"shape": replace(PLAIN, window=9)}, "windows", "tokens: windows"),
        ((GOOD, WINDOWS), {"shape": replace(PLAIN, has_sinks=True)}, None, ""),
        ((GOOD, WINDOWS), {"shape": LayerGeometry(4, 2, 24, 16)}, None, ""),
    ],
)
def test_the_first_that_is_right_and_no_slower_is_chosen(
    found: tuple[PromptKernel, ...],
    settings: dict[str, Any],
    want: str | None,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(*found, **settings) == want
    assert said in caplog.text


def test_a_lack_of_memory_is_no_verdict() -> None:
    def full(*_call: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        chosen(PromptKernel("full", full), GOOD)


def test_only_chunks_of_that_length_go_to_it() -> None:
    """bridle's own kernel computes all shorter chunks of the step, and all layers that the library's kernel does not
    support."""
    pool = Pool(PLAIN, 4, list(range(200)))
    for _ in range(4):
        pool.mirrors.append(CachedRequestState())
        pool.computed.append(0)
    pool.compute([pool.grow(3, 50)])
    step, query = pool.compute([pool.grow(number, length) for number, length in enumerate((30, 5, 24, 40))])
    calls: list[tuple[int, int]] = []

    def noting(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        calls.append((len(query), len(keys)))
        return exact(query, keys, values, options)

    kernel = TorchPaged(CPU)
    kernel.prompts = PromptKernel("noting", noting)
    for options, want in (
        (AttentionOptions(0.25), [(30, 30), (24, 24), (40, 90)]),
        (AttentionOptions(0.25, window=7), []),
        (AttentionOptions(0.25, softcap=2.0), []),
    ):
        calls.clear()
        reference = attend(ReferenceKernel(), pool, step, query, options)
        torch.testing.assert_close(attend(kernel, pool, step, query, options), reference, atol=1e-5, rtol=1e-4)
        assert calls == want


def fake_varlen(*call: Any, **settings: Any) -> Tensor:
    query, keys, values, ends, key_ends, longest, longest_context = call
    assert ends.tolist() == [0, len(query)] == [0, longest]
    assert key_ends.tolist() == [0, len(keys)] == [0, longest_context]
    left, right = settings["window_size"]
    assert right == 0
    assert settings["enable_gqa"]
    return exact(query, keys, values, AttentionOptions(settings["scale"], None if left < 0 else left + 1))


def fake_flash3(query: Tensor, keys: Tensor, values: Tensor, *, softmax_scale: float, causal: bool) -> Tensor:
    assert causal
    return exact(query[0], keys[0], values[0], AttentionOptions(softmax_scale)).unsqueeze(0)


@pytest.mark.parametrize("name", ["flash", "cudnn", "varlen", "flash3"])
def test_calls_of_libraries_mean_what_layers_ask_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen)
    monkeypatch.setattr(SDPBackend, "CUDNN_ATTENTION", SDPBackend.FLASH_ATTENTION)  # which a CPU has
    kernels = {
        "flash": prompts.flash,
        "cudnn": prompts.cudnn,
        "varlen": prompts.varlen,
        "flash3": lambda *call: prompts.flash3(fake_flash3, *call),
    }
    windows = (None, 5) if name == "varlen" else (None,)
    for (length, context), window in ((sizes, window) for sizes in ((9, 9), (4, 11)) for window in windows):
        query = torch.randn(length, 4, 16)
        keys, values = torch.randn(2, context, 2, 16)
        options = AttentionOptions(0.3, window)
        torch.testing.assert_close(kernels[name](query, keys, values, options), exact(query, keys, values, options))


def test_the_fastest_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "find_spec", lambda name: name)
    monkeypatch.setattr(prompts, "import_module", lambda name: SimpleNamespace(flash_attn_func=fake_flash3))
    names = [kernel.name for kernel in prompts.candidates(torch.bfloat16)]
    assert names == ["FlashAttention-3", "cuDNN", "varlen_attn", "FlashAttention-2"]
    assert "FlashAttention-3" not in [kernel.name for kernel in prompts.candidates(torch.float16)]
