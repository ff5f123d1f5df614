"""Benchmark of prompts with images, compared with transformers' `generate` over the same weights.

The benchmark measures time to the first token and tokens per second with no image, one and eight images. The benchmark
also measures a chat with the same image in each turn, and how much image encoding slows down other streams.

bridle and transformers run in this process with the same threads and pixels, in turns. Each figure is the best of its
rounds, and each round has different images. Processor time is reported as well, because its ratio is reliable on a busy
machine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import InternalError
from dev.bench.images_neighbours import measure_neighbours
from dev.bench.images_peers import IMAGE, VOCABULARY, ImageRun, Ours, Theirs

if TYPE_CHECKING:
    from rich.console import Console


#: Layers and hidden size of the text part and of the tower, and the side of an image, with patches of 14 pixels.
SHAPES = {"quick": (4, 256, 6, 256, 112), "full": (8, 512, 12, 384, 224)}
_PATCH, _HEADS = 14, 8
_COUNTS = (0, 1, 8)
_PROMPTS, _CHAT, _NEIGHBOURS = "prompts with pictures", "a chat about one", "streams beside pictures"
_STREAM_TOKENS = 512
_LOAD_SECONDS = 3.0  # until both peers are loaded


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run the three scenes: prompts with images, a chat about an image, and text streams during prompts with images.
    Prints a table after each part."""
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
                neighbours = measure_neighbours(ours, _num_streams(settings), _STREAM_TOKENS, _num_pairs(settings))
        finally:
            ours.close()
    _print(console, prompts, chat, neighbours)
    return {"num_tokens": num_tokens, "prompts": prompts, "chat": chat, "neighbours": neighbours}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each scene: encoding its images, and the tokens after them."""
    name, num_tokens, num_rounds = _scale(settings)
    layers, hidden, eye_layers, eye_hidden, side = SHAPES[name]
    places = (side // _PATCH) ** 2
    text = BenchCheckpoint(name, Path(), VOCABULARY, (num := 13 * layers * hidden**2 + VOCABULARY * hidden), 4 * num, 0)
    eye = BenchCheckpoint(name, Path(), 0, 12 * eye_layers * eye_hidden**2, 0, 0)

    def answers(count: int, num_pictures: int, length: int) -> float:
        seen = limits.seconds(eye, count * num_pictures * places, 0)
        return seen + limits.seconds(text, count * (num_pictures * places + 24), count * length)

    turns, streams, pairs = _num_turns(settings), _num_streams(settings), _num_pairs(settings)
    start = limits.python(_LOAD_SECONDS)
    return {
        _PROMPTS: start + 2 * num_rounds * sum(answers(1, count, num_tokens) for count in _COUNTS),
        _CHAT: answers(turns, 1, num_tokens) + answers(turns, 1, 1),
        _NEIGHBOURS: limits.seconds(text, streams * _STREAM_TOKENS, _STREAM_TOKENS) + answers(8 * pairs, 1, 1),
    }


def _scale(settings: BenchSettings) -> tuple[str, int, int]:
    """Return the name of a shape, the number of new tokens, and the number of rounds."""
    return ("quick", 16, 2) if settings.quick else ("full", 48, 3)


def _num_turns(settings: BenchSettings) -> int:
    return 3 if settings.quick else 6


def _num_streams(settings: BenchSettings) -> int:
    return 4 if settings.quick else 8


def _num_pairs(settings: BenchSettings) -> int:
    return 12 if settings.quick else 24


# -- scenes --------------------------------------------------------------------------------------------------


def _race(ours: Ours, theirs: Theirs, num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    """Measure one prompt at a time, with growing numbers of images."""
    figures = []
    peers: list[tuple[str, Ours | Theirs]] = [("bridle", ours), ("transformers", theirs)]
    for _, peer in peers:
        peer.answer(ours.prompt(1, 1), 2)  # build now what would be built lazily
    for count in _COUNTS:
        runs: dict[str, list[ImageRun]] = {"bridle": [], "transformers": []}
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


def _same(ours: Sequence[ImageRun], theirs: Sequence[ImageRun]) -> float:
    """Return the share of answers with the same first token. A program with wrong results might look fast, so a low
    share is an error. Rounding may still decide between two tokens that are almost equally probable."""
    share = sum(one.tokens[0] == other.tokens[0] for one, other in zip(ours, theirs, strict=True)) / len(ours)
    if share < 0.5:
        raise InternalError(f"the peers begin {share:.0%} of their answers alike")
    return share


def _chat(ours: Ours, theirs: Theirs, num_turns: int, num_tokens: int) -> dict[str, Any]:
    """Measure a chat whose turns each repeat the image and the whole conversation. The image's features and most of the
    KV are cached."""
    before, said = ours.num_encoded, list[int]()
    first: dict[str, list[float]] = {"bridle": [], "transformers": []}
    for turn in range(num_turns):
        prompt = ours.prompt(1, 77, more=said)
        run = ours.answer(prompt, num_tokens)
        first["bridle"].append(run.first_token)
        first["transformers"].append(theirs.answer(prompt, 1).first_token)
        said += [*run.tokens, 9, 10 + turn]
    return {"turns": num_turns, "num_encoded": ours.num_encoded - before, "first_token_seconds": first}


# -- the checkpoint and the table ------------------------------------------------------------------------------


def _make_checkpoint(shape: tuple[int, int, int, int, int], folder: Path) -> Path:
    """Write a LLaVA checkpoint with random weights."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    layers, hidden, eye_layers, eye_hidden, side = shape
    text = LlamaConfig(
        vocab_size=VOCABULARY,
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
        LlavaConfig(vision_config=eye, text_config=text, image_token_index=IMAGE)
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
        f"Median gap of {neighbours['streams']} streams while a picture is encoded: {neighbours['ratio']:.2f} times "
        f"that without, {neighbours['processor_ratio']:.2f} by the processor time of a step; the picture has "
        f"{neighbours['picture_share']:.2f} of the speed that it has alone."
    )
