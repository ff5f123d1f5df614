"""Prompts with images for tests of executors, compared with transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.engine.multimodal.encoder_cache import EncoderCache
from bridle.engine.multimodal.multimodal_inputs import (
    PROMPT_IDS,
    MultiModalItem,
    PlaceholderRange,
    align_to_item,
)
from bridle.engine.request import Request
from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.model.executor import LocalExecutor
from bridle.multimodal import MediaReader, Picture
from bridle.outputs import Event, Finished, TokenEvent
from bridle.sampling import SamplingParams
from bridle.tokenizer import Tokenizer
from tests.fakes import vision_checkpoints

#: The largest error that rounding explains, relative to the largest logit.
LIMIT = 1e-5
#: The same of gated delta nets: the library computes prompts by another formula.
DELTA_LIMIT = 1e-4


@dataclass
class Eyes:
    """A tiny checkpoint of one family with transformers' model of it, and bridle's image reader and tokenizer."""

    family: str
    folder: Path
    whole: Any
    reader: MediaReader
    tokenizer: Tokenizer

    def prompt(self, *parts: str | Picture) -> Prompt:
        """Return a prompt with these texts and images in order."""
        text = "".join(
            part if isinstance(part, str) else vision_checkpoints.placeholder_of(self.family) for part in parts
        )
        pictures = [part for part in parts if isinstance(part, Picture)]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        placed, sights = self.reader.place(tokens, pictures, self.tokenizer)
        return Prompt(placed, sights.runs, sights.media, pictures)

    def picture(self, seed: int, height: int = 24, width: int = 30) -> Picture:
        numbers = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
        return self.reader.read(Image.fromarray(numbers))

    def logits(self, prompt: Prompt, more: Sequence[int] = ()) -> Tensor:
        """Return the logits [L, V] of transformers' eager pass over the prompt's pixels and the tokens `more`."""
        ids = torch.tensor([[*prompt.tokens, *more]])
        inputs: dict[str, Any] = {"input_ids": ids, **self._pixels(prompt)}
        if self.family == "gemma4_mutual":
            inputs["mm_token_type_ids"] = (ids == vision_checkpoints.IMAGE).int()
        if self.family == "gemma3":
            inputs["token_type_ids"] = (ids == vision_checkpoints.IMAGE).int()
        if prompt.media and prompt.media[0].arrays[0].name == PROMPT_IDS:  # the prompt's are 0
            inputs["token_type_ids"] = (torch.arange(ids.shape[1]) >= len(prompt.tokens)).int()[None]
        if self.family == "ernie4_5_vl_moe":
            inputs["moe_mm_token_type_ids"] = (ids >= vision_checkpoints.IMAGE - 2).int()
        if prompt.runs and prompt.runs[0].grid is not None:
            inputs["mm_token_type_ids"] = (ids == vision_checkpoints.IMAGE).int()
            self.whole.model.rope_deltas = None
        with torch.inference_mode():
            return self.whole(**inputs, use_cache=False).logits[0]  # type: ignore[no-any-return]

    def _pixels(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return the arrays of all images, which have equal sizes, as arguments of transformers' model."""
        found: dict[str, list[Tensor]] = {}
        for picture in prompt.pictures:
            for array in picture.medium.arrays:
                numbers = np.frombuffer(array.data, array.dtype).reshape(array.shape).copy()
                found.setdefault(array.name, []).append(torch.from_numpy(numbers))
        side = 1 if self.family in ("idefics3", "smolvlm") else 0
        return {name: torch.cat(parts, side) for name, parts in found.items()}


@dataclass
class Prompt:
    tokens: tuple[int, ...]
    runs: tuple[PlaceholderRange, ...]
    media: tuple[MultiModalItem, ...]
    pictures: list[Picture]


def pool_of(executor: LocalExecutor) -> EncoderCache:
    assert executor.media is not None
    return EncoderCache(executor.media)


def make_ready(executor: LocalExecutor, media: Sequence[MultiModalItem]) -> None:
    """Encode the images `media`; wait for the thread that encodes them."""
    store, changed = pool_of(executor), threading.Event()
    store.on_change = changed.set
    for medium in media:
        store.open(medium)
    keys = list(dict.fromkeys(medium.key for medium in media))
    while store.begin_step(keys) != set(keys):
        assert not (failures := store.take_failures()), failures
        assert changed.wait(120)
        changed.clear()
    store.close()


def run_packed(executor: LocalExecutor, prompts: Sequence[Prompt], chunks: Sequence[int]) -> list[Tensor]:
    """Return the logits [L, V] of all positions of each prompt. Prompts are computed together, in chunks whose lengths
    repeat."""
    size = executor.info.block_size
    free = iter([*range(1, executor.info.num_blocks, 2), *range(0, executor.info.num_blocks, 2)])
    done, blocks = [0] * len(prompts), [0] * len(prompts)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    number = 0
    while any(done[i] < len(prompt.tokens) for i, prompt in enumerate(prompts)):
        rows = []
        for i, prompt in enumerate(prompts):
            count = min(chunks[(number + i) % len(chunks)], len(prompt.tokens) - done[i])
            if not count:
                continue
            count = align_to_item(prompt.runs, done[i], done[i] + count) - done[i]
            needed = -(-(done[i] + count) // size) - blocks[i]
            row = PlanRow(i, done[i], count, num_logits=count, num_kept_blocks=blocks[i], num_prompt=len(prompt.tokens))
            row.state = i if executor.info.num_states else -1
            if not done[i]:
                row.new_tokens, row.runs = prompt.tokens, prompt.runs
            else:
                row.num_kept = len(prompt.tokens)
            row.new_blocks = tuple(next(free) for _ in range(needed))
            blocks[i] += needed
            rows.append(row)
        number += 1
        executor.forward(StepPlan(number, rows))
        logits = executor.logits
        assert logits is not None
        for row, part in zip(rows, torch.split(logits, [row.num_logits for row in rows]), strict=True):
            parts[row.seq_id].append(part)
            done[row.seq_id] += row.num_scheduled
    executor.reset()
    return [torch.cat(part) for part in parts]


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of two logits, relative to the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def play(engine: Engine, requests: Sequence[Request]) -> tuple[dict[tuple[str, int], list[int]], list[Finished]]:
    """Run requests that are all added at once; return the tokens of each output."""
    for request in requests:
        engine.add(request)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    tokens: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            tokens.setdefault((event.request_id, event.index), []).append(event.token)
    return tokens, [event for event in events if isinstance(event, Finished)]


def check_engine_draws(
    executor: LocalExecutor,
    prompts: Mapping[str, Prompt],
    logits: Callable[[Prompt, Any], Tensor],
    banned: range,
    budget: int = 9,
) -> None:
    """Check that an engine samples the same tokens as transformers: first all prompts together, then each again from
    the prefix cache. Each image must be encoded only once. `banned` are the placeholder tokens, the last ones of the
    vocabulary."""
    engine = Engine(executor, EngineConfig(max_num_batched_tokens=budget), media=pool_of(executor))
    bias = dict.fromkeys(banned, -1000.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias=bias)

    def asked(name: str) -> Request:
        return Request(name, prompts[name].tokens, sampling, media=prompts[name].media, runs=prompts[name].runs)

    early, _ = play(engine, [asked(name) for name in prompts])
    for name, prompt in prompts.items():
        late, finished = play(engine, [asked(name)])
        assert late[name, 0] == early[name, 0]
        assert finished[0].usage.cached_tokens >= len(prompt.tokens) // 4 * 4 - 4
        wanted = logits(prompt, tuple(late[name, 0]))[len(prompt.tokens) - 1 : -1]
        assert wanted[:, : banned.start].argmax(-1).tolist() == late[name, 0]
    assert engine.statistics().num_media_encoded == len({run.key for prompt in prompts.values() for run in prompt.runs})
    engine.close()
