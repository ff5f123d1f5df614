"""Prompts with pictures: time to the first token and tokens per second with none, one and eight, beside transformers'
`generate` over the same weights; a chat that shows the same picture in each turn; and what streams notice of pictures
that are encoded beside them.

Both peers run in this process with the same threads and pixels, in turns; each figure is the best of its rounds, each
round with pictures of its own. Beside the clock stands processor time, whose ratio can be trusted on a busy machine.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.bench.checkpoints import Checkpoint
from bridle.bench.phases import Limits, Phases
from bridle.bench.settings import Settings
from bridle.errors import InternalError

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.engine.media import Sights
    from bridle.engine.request import Request
    from bridle.media import Picture

#: Layers and hidden size of the text part and of the tower, the side of a picture, and patches of 14 pixels.
SHAPES = {"quick": (4, 256, 6, 256, 112), "full": (8, 512, 12, 384, 224)}
_PATCH, _HEADS = 14, 8
_VOCABULARY = 4_096
_IMAGE = _VOCABULARY - 1
_COUNTS = (0, 1, 8)
#: Seconds after which an engine is asked for a step though no picture has come.
_LONGEST_WAIT = 0.05
_PROMPTS, _CHAT, _NEIGHBOURS = "prompts with pictures", "a chat about one", "streams beside pictures"
_LOAD_SECONDS = 3.0  # until both peers have loaded


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens with the rows of pictures in their places."""

    tokens: tuple[int, ...]
    sights: Sights
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What one answer took, in seconds, and its tokens."""

    first_token: float
    seconds: float
    cpu_seconds: float
    tokens: tuple[int, ...]

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def measure(settings: Settings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run the three scenes. Prints a table as it goes."""
    name, num_tokens, num_rounds = _scale(settings)
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        path = _make_checkpoint(SHAPES[name], Path(folder))
        ours = Ours(path, settings.threads)
        try:
            theirs = Theirs(path)
            with phases.part(_PROMPTS):
                prompts = _race(ours, theirs, num_tokens, num_rounds)
            with phases.part(_CHAT):
                chat = _chat(ours, theirs, _num_turns(settings), num_tokens)
            with phases.part(_NEIGHBOURS):
                neighbours = _neighbours(ours, _num_streams(settings), 2 * num_tokens)
        finally:
            ours.close()
    _print(console, prompts, chat, neighbours)
    return {"num_tokens": num_tokens, "prompts": prompts, "chat": chat, "neighbours": neighbours}


def guesses(settings: Settings, limits: Limits) -> dict[str, float]:
    """About how many seconds each scene takes: pictures that are encoded, and tokens behind them."""
    name, num_tokens, num_rounds = _scale(settings)
    layers, hidden, eye_layers, eye_hidden, side = SHAPES[name]
    places = (side // _PATCH) ** 2
    text = Checkpoint(name, Path(), _VOCABULARY, (num := 13 * layers * hidden**2 + _VOCABULARY * hidden), 4 * num, 0)
    eye = Checkpoint(name, Path(), 0, 12 * eye_layers * eye_hidden**2, 0, 0)

    def answers(count: int, num_pictures: int, length: int) -> float:
        seen = limits.seconds(eye, count * num_pictures * places, 0)
        return seen + limits.seconds(text, count * (num_pictures * places + 24), count * length)

    turns, streams = _num_turns(settings), _num_streams(settings)
    start = limits.python(_LOAD_SECONDS)
    return {
        _PROMPTS: start + 2 * num_rounds * sum(answers(1, count, num_tokens) for count in _COUNTS),
        _CHAT: answers(turns, 1, num_tokens) + answers(turns, 1, 1),
        _NEIGHBOURS: 2 * limits.seconds(text, streams * 2 * num_tokens, 2 * num_tokens) + answers(3, 1, 1),
    }


def _scale(settings: Settings) -> tuple[str, int, int]:
    """A shape, new tokens, and rounds."""
    return ("quick", 16, 2) if settings.quick else ("full", 48, 3)


def _num_turns(settings: Settings) -> int:
    return 3 if settings.quick else 6


def _num_streams(settings: Settings) -> int:
    return 4 if settings.quick else 8


# -- peers ---------------------------------------------------------------------------------------------------


class Ours:
    """An engine over the checkpoint, stepped as fast as it goes."""

    def __init__(self, path: Path, threads: int | None) -> None:
        from bridle.config import ModelConfig
        from bridle.engine import Engine
        from bridle.engine.media_pool import MediaPool
        from bridle.media import open_reader
        from bridle.model import load_executor

        executor = load_executor(ModelConfig(str(path), num_threads=threads))
        pool = MediaPool(executor.media)  # type: ignore[arg-type,union-attr]
        self._changed = threading.Event()  # a picture is there
        pool.on_change = self._changed.set
        self.engine = Engine(executor, media=pool)
        reader = open_reader(path)
        assert reader is not None
        self._reader = reader
        self._num_requests = 0

    def prompt(self, num_pictures: int, seed: int, *, more: Sequence[int] = ()) -> Prompt:
        """Some text, pictures that no other seed has, and more text."""
        from PIL import Image

        random = np.random.RandomState(seed)
        shape = (320, 320, 3)
        images = [Image.fromarray(random.randint(0, 255, shape, dtype=np.uint8)) for _ in range(num_pictures)]
        pictures = tuple(self._reader.read(image) for image in images)
        start = random.randint(10, _IMAGE, 24).tolist()
        tokens, sights = self._reader.place((*start, *[_IMAGE] * num_pictures, 7, *more), pictures, _NoTokens())
        return Prompt(tokens, sights, pictures)

    def request(self, prompt: Prompt, num_tokens: int) -> Request:
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

    def answer(self, prompt: Prompt, num_tokens: int) -> Run:
        request = self.request(prompt, num_tokens)
        began, began_cpu = time.perf_counter(), time.process_time()
        self.engine.add(request)
        times, tokens = [], []
        while self.engine.has_work:
            for event in self._step():
                times.append(time.perf_counter())
                tokens.append(event)
        return Run(times[0] - began, times[-1] - began, time.process_time() - began_cpu, tuple(tokens))

    def _step(self) -> list[int]:
        return [token for _, token in self.step()]

    def step(self) -> list[tuple[str, int]]:
        """One step's tokens, by request. Raises the error of a request that fails."""
        from bridle.outputs import Finished, TokenEvent

        found = []
        if (
            self.engine.is_stalled
        ):  # all wait for pictures; not to be asked in vain, which would slow their encoding down
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
    """This family puts no marker texts around pictures."""

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise InternalError(f"no tokens are known for {text!r}")

    def token_text(self, token: int) -> str:
        return str(token)


class Theirs:
    """The library's `generate` with the same weights."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self._model: Any = AutoModelForImageTextToText.from_pretrained(path).eval()
        self._model.generation_config.eos_token_id = None

    def answer(self, prompt: Prompt, num_tokens: int) -> Run:
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
        return Run(clock.times[1] - began, seconds, cpu, tuple(found[0, ids.shape[1] :].tolist()))


class _Clock:
    """Notes when `generate` says something: the prompt first, then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


# -- scenes --------------------------------------------------------------------------------------------------


def _race(ours: Ours, theirs: Theirs, num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    """One prompt at a time, with more and more pictures."""
    figures = []
    peers: list[tuple[str, Ours | Theirs]] = [("bridle", ours), ("transformers", theirs)]
    for _, peer in peers:
        peer.answer(ours.prompt(1, 1), 2)  # whatever is built lazily is built now
    for count in _COUNTS:
        runs: dict[str, list[Run]] = {"bridle": [], "transformers": []}
        for number in range(num_rounds):
            prompt = ours.prompt(count, 1_000 * count + number + 10)
            for name, peer in peers if number % 2 else reversed(peers):
                runs[name].append(peer.answer(prompt, num_tokens))
        same = _same(runs["bridle"], runs["transformers"])
        for name, found in runs.items():
            figures.append(
                {
                    "pictures": count,
                    "peer": name,
                    "prompt_tokens": len(prompt.tokens),
                    "first_token_seconds": min(run.first_token for run in found),
                    "tokens_per_second": max(run.tokens_per_second for run in found),
                    "cpu_seconds": min(run.cpu_seconds for run in found),
                    "same_tokens": same,
                }
            )
    return figures


def _same(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """The share of answers that begin alike. A peer that computes something else would look fast; rounding may still
    decide between two tokens that are nearly as likely."""
    share = sum(one.tokens[0] == other.tokens[0] for one, other in zip(ours, theirs, strict=True)) / len(ours)
    if share < 0.5:
        raise InternalError(f"the peers begin {share:.0%} of their answers alike")
    return share


def _chat(ours: Ours, theirs: Theirs, num_turns: int, num_tokens: int) -> dict[str, Any]:
    """The same picture in each turn, behind it all that was said: its features are found, and most of the KV."""
    before, said = ours.num_encoded, list[int]()
    first: dict[str, list[float]] = {"bridle": [], "transformers": []}
    for turn in range(num_turns):
        prompt = ours.prompt(1, 77, more=said)
        run = ours.answer(prompt, num_tokens)
        first["bridle"].append(run.first_token)
        first["transformers"].append(theirs.answer(prompt, 1).first_token)
        said += [*run.tokens, 9, 10 + turn]
    return {"turns": num_turns, "num_encoded": ours.num_encoded - before, "first_token_seconds": first}


def _neighbours(ours: Ours, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """Gaps between tokens of streams of text: alone, and while others bring pictures that are encoded beside them."""
    gaps = {name: _gaps(ours, num_streams, num_tokens, pictures) for name, pictures in (("alone", 0), ("beside", 3))}
    found: dict[str, Any] = {"streams": num_streams}
    for name, times in gaps.items():
        found[name] = {"median_gap": median(times), "longest_gap": max(times)}
    return found | {"ratio": found["beside"]["median_gap"] / found["alone"]["median_gap"]}


def _gaps(ours: Ours, num_streams: int, num_tokens: int, num_pictures: int) -> list[float]:
    streams = [ours.request(ours.prompt(0, 300 + number), num_tokens) for number in range(num_streams)]
    seen = [ours.request(ours.prompt(1, 500 + number), 1) for number in range(num_pictures)]
    last: dict[str, float] = {}
    gaps = []
    for request in streams:
        ours.engine.add(request)
    names = {request.id for request in streams}
    while ours.engine.has_work:
        if seen and len(last) == num_streams:  # all streams are under way
            ours.engine.add(seen.pop())
        for name, _ in ours.step():
            now = time.perf_counter()
            if name in last:
                gaps.append(now - last[name])
            if name in names:
                last[name] = now
    return gaps


# -- the checkpoint and the table ------------------------------------------------------------------------------


def _make_checkpoint(shape: tuple[int, int, int, int, int], folder: Path) -> Path:
    """A LLaVA with random weights."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    layers, hidden, eye_layers, eye_hidden, side = shape
    text = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        initializer_range=0.1,
    )
    eye = CLIPVisionConfig(
        hidden_size=eye_hidden,
        intermediate_size=4 * eye_hidden,
        num_hidden_layers=eye_layers,
        num_attention_heads=_HEADS,
        image_size=side,
        patch_size=_PATCH,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(
        LlavaConfig(vision_config=eye, text_config=text, image_token_index=_IMAGE)
    ).save_pretrained(folder)
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}, "crop_size": side}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _print(
    console: Console, prompts: Sequence[dict[str, Any]], chat: dict[str, Any], neighbours: dict[str, Any]
) -> None:
    from rich.table import Table

    table = Table(title="Pictures in a prompt")
    for heading in ("pictures", "peer", "prompt tokens", "first token, ms", "tokens/s", "CPU, s"):
        table.add_column(heading, justify="left" if heading == "peer" else "right", no_wrap=True)
    for each in prompts:
        table.add_row(
            str(each["pictures"]),
            each["peer"],
            str(each["prompt_tokens"]),
            f"{1e3 * each['first_token_seconds']:.1f}",
            f"{each['tokens_per_second']:.1f}",
            f"{each['cpu_seconds']:.2f}",
        )
    console.print(table)
    for peer, times in chat["first_token_seconds"].items():
        shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in times)
        console.print(f"The same picture in {chat['turns']} turns, {peer}: first token after {shown} ms")
    console.print(f"It was encoded {chat['num_encoded']} time{'s' * (chat['num_encoded'] != 1)}.")
    console.print(
        f"Median gap of {neighbours['streams']} streams while pictures are encoded: {neighbours['ratio']:.2f} times "
        "that without"
    )
