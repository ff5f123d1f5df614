"""The programs of `bridle bench images` that answer prompts with images: bridle's engine, and transformers over the
same weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.errors import InternalError

if TYPE_CHECKING:
    from bridle.engine.multimodal.multimodal_inputs import MultiModalInputs
    from bridle.engine.request import Request
    from bridle.model.media_device import LocalMedia
    from bridle.multimodal import Picture

#: The size of the vocabulary, and the id of a token that stands for a row of an image.
VOCABULARY = 4_096
IMAGE = VOCABULARY - 1
#: Seconds after which the engine runs a step although no image is encoded.
_LONGEST_WAIT = 0.05


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Tokens of a prompt, with placeholder tokens for the images."""

    tokens: tuple[int, ...]
    sights: MultiModalInputs
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Times of one answer in seconds, and the tokens of the answer."""

    first_token: float
    seconds: float
    cpu_seconds: float
    tokens: tuple[int, ...]

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


class Ours:
    """A bridle engine over the checkpoint, stepped as fast as possible."""

    def __init__(self, path: Path, threads: int | None) -> None:
        from bridle.config import ModelConfig
        from bridle.engine import Engine
        from bridle.engine.multimodal.encoder_cache import EncoderCache
        from bridle.model import load_executor
        from bridle.multimodal import open_reader

        executor = load_executor(ModelConfig(str(path), num_threads=threads))
        self.media: LocalMedia = executor.media  # type: ignore[assignment,union-attr]
        pool = EncoderCache(self.media)
        self._changed = threading.Event()  # set when an image is encoded
        pool.on_change = self._changed.set
        self.engine = Engine(executor, media=pool)
        reader = open_reader(path)
        assert reader is not None
        self._reader = reader
        self._num_requests = 0

    def prompt(self, num_pictures: int, seed: int, *, more: Sequence[int] = ()) -> ImagePrompt:
        """Return a prompt with some text, then images that no other `seed` gives, then more text."""
        from PIL import Image

        random = np.random.RandomState(seed)
        shape = (320, 320, 3)
        images = [Image.fromarray(random.randint(0, 255, shape, dtype=np.uint8)) for _ in range(num_pictures)]
        pictures = tuple(self._reader.read(image) for image in images)
        start = random.randint(10, IMAGE, 24).tolist()
        tokens, sights = self._reader.place((*start, *[IMAGE] * num_pictures, 7, *more), pictures, _NoTokens())
        return ImagePrompt(tokens, sights, pictures)

    def request(self, prompt: ImagePrompt, num_tokens: int) -> Request:
        from bridle.engine.request import Request
        from bridle.sampling import SamplingParams

        self._num_requests += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return Request(
            f"r{self._num_requests}",
            prompt.tokens,
            sampling,
            detokenize=False,
            media=prompt.sights.media,
            runs=prompt.sights.runs,
        )

    def answer(self, prompt: ImagePrompt, num_tokens: int) -> ImageRun:
        request = self.request(prompt, num_tokens)
        began, began_cpu = time.perf_counter(), time.process_time()
        self.engine.add(request)
        times, tokens = [], []
        while self.engine.has_work:
            for event in self._step():
                times.append(time.perf_counter())
                tokens.append(event)
        return ImageRun(times[0] - began, times[-1] - began, time.process_time() - began_cpu, tuple(tokens))

    def _step(self) -> list[int]:
        return [token for _, token in self.step()]

    def step(self) -> list[tuple[str, int]]:
        """Run one step; return its tokens by request. Raises the error of a request that fails."""
        from bridle.outputs import Finished, TokenEvent

        found = []
        if self.engine.is_stalled:  # all requests wait for images; steps without work would slow the encoding down
            self._changed.wait(_LONGEST_WAIT)
        self._changed.clear()
        for event in self.engine.step():
            if isinstance(event, Finished) and event.error is not None:
                raise event.error
            if isinstance(event, TokenEvent):
                found.append((event.request_id, event.token))
        return found

    @property
    def num_encoded(self) -> int:
        return self.engine.statistics().num_media_encoded

    def close(self) -> None:
        self.engine.close()


class _NoTokens:
    """A tokenizer without texts: this family of models needs no marker texts around images."""

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise InternalError(f"no tokens are known for {text!r}")

    def token_text(self, token: int) -> str:
        return str(token)


class Theirs:
    """transformers' `generate` over the same weights."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self._model: Any = AutoModelForImageTextToText.from_pretrained(path).eval()
        self._model.generation_config.eos_token_id = None

    def answer(self, prompt: ImagePrompt, num_tokens: int) -> ImageRun:
        import torch

        ids = torch.tensor([prompt.tokens])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.pictures:
            arrays = [array for picture in prompt.pictures for array in picture.medium.arrays]
            pixels = [np.frombuffer(one.data, one.dtype).reshape(one.shape).copy() for one in arrays]
            inputs["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
        clock = _Clock()
        began, began_cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            found = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, streamer=clock)
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        return ImageRun(clock.times[1] - began, seconds, cpu, tuple(found[0, ids.shape[1] :].tolist()))


class _Clock:
    """Records the times at which `generate` reports tokens: the prompt first, then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...
