"""What the demo model that sees is trained on: scenes, questions whose answers follow from them, and rows of both."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedTokenizerFast

from lab.demo.corpus.split import split_of
from lab.demo.seeing import rows as rows_module
from lab.demo.seeing.questions import KINDS, NO_PICTURE, any_question, ask
from lab.demo.seeing.rows import MARKED_PICTURE, RowMaker, RowShape, pixels_of
from lab.demo.seeing.scenes import COLORS, PLACES, SHAPES, Scene, Thing, draw_scene, paint
from lab.demo.seeing.tokenizer import IMAGE, train_tokenizer
from lab.demo.seeing.trainer import SeeingRecipe, SeeingTrainer

SHAPE = RowShape(rows=3, length=64, stages=(2,))
RECIPE = SeeingRecipe(
    rates=((0, 0.0), (2, 0.02), (4, 0.0)),
    hidden_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate_size=48,
    eye_size=24,
    eye_layers=1,
    eye_heads=2,
    eye_intermediate_size=32,
    shape=SHAPE,
)
SCENE: Scene = (Thing("circle", "red"), None, Thing("star", "blue"), Thing("star", "red"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(1)


def answers(kind: str, scene: Scene = SCENE) -> dict[str, str]:
    """All questions of a kind that are drawn about a scene, and their answers."""
    rng = random.Random(0)
    found = [ask(rng, scene, kind) for _ in range(2000)]
    return {question.text: question.answer for question in found if question}


def test_answers_follow_from_the_scene() -> None:
    assert answers("place")["What is in the top left?"] == "A red circle."
    assert answers("place")["What is top right?"] == "Nothing."
    assert answers("color")["What color is the circle?"] == "Red."
    assert answers("color")["What colour is the square?"] == "There is no square."
    assert answers("color")["Which color is in the bottom left?"] == "Blue."
    assert answers("where")["Where is the blue star?"] == "In the bottom left."
    assert answers("where")["Where is the blue shape?"] == "In the bottom left."
    assert answers("where")["Where is the red square?"] == "There is no red square."
    assert answers("count")["How many shapes are there?"] == "Three."
    assert answers("count")["How many stars are there?"] == "Two."
    assert answers("count")["How many green shapes do you see?"] == "None."
    assert answers("yes/no")["Is there a blue star?"] == "Yes."
    assert answers("yes/no")["Is there a blue circle?"] == "No."
    assert answers("yes/no")["Is the top right empty?"] == "Yes."
    said = "A red circle in the top left, a blue star in the bottom left, a red star in the bottom right."
    assert answers("describe")["What do you see?"] == said
    assert set(answers("describe", (None,) * 4).values()) == {"Nothing."}


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_has_one_answer(kind: str) -> None:
    """The same words about the same scene are always answered alike; and nobody asks for "the star" of two."""
    rng = random.Random(kind)
    for _ in range(60):
        scene = draw_scene(rng, "train")
        found: dict[str, set[str]] = {}
        for _ in range(40):
            if (question := ask(rng, scene, kind)) is not None:
                found.setdefault(question.text, set()).add(question.answer)
        assert all(len(each) == 1 for each in found.values())
    if kind in ("where", "color"):
        assert not [text for text in answers(kind) if text.endswith(("is the star?", "see the star?"))]


def test_held_out_scenes_are_never_trained_on(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted: list[Scene] = []

    def note(scene: Scene, rng: random.Random) -> Image.Image:
        painted.append(scene)
        return paint(scene, rng)

    monkeypatch.setattr(rows_module, "paint", note)
    for step in range(40):
        RowMaker(tokenizer).make(SHAPE, 1, step)
    assert len(painted) > 80
    assert {split_of(("scene", *map(str, scene))) for scene in painted} == {"train"}
    rng = random.Random(0)
    assert not {draw_scene(rng, "heldout") for _ in range(200)} & set(painted)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_their_color_and_stay_in_their_quarter(shape: str) -> None:
    rng = random.Random(shape)
    for place, color in [(place, color) for place in range(len(PLACES)) for color in COLORS]:
        scene = tuple(Thing(shape, color) if each == place else None for each in range(len(PLACES)))
        pixels = np.asarray(paint(scene, rng), dtype=int)
        ground = np.abs(pixels - pixels[0, 0]).sum(axis=2)
        top, left = 96 * (place // 2), 96 * (place % 2)
        assert ground[top : top + 96, left : left + 96].any()
        ground[top : top + 96, left : left + 96] = 0
        assert not ground.any()
        middle = pixels[top + 48, left + 48]
        assert np.abs(middle - COLORS[color]).max() <= 20


def test_batches_follow_from_the_step(tokenizer: PreTrainedTokenizerFast) -> None:
    first, again, other = (RowMaker(tokenizer).make(SHAPE, 1, step) for step in (0, 0, 1))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first.pixels, other.pixels[: len(first.pixels)])


def test_what_is_learned_is_what_will_be_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    """Along a way, a row is the chat template's text for a conversation, with the picture's rows in place."""
    question = "Where is the red circle?"
    parts = [{"type": "text", "text": question}, {"type": "image"}]
    said = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
        tokenize=False,
        add_generation_prompt=True,
    )
    wanted = f"<|bos|><|system|>Be brief.<|end|><|user|>{MARKED_PICTURE}{question}<|end|><|assistant|>"
    assert said.replace(IMAGE, MARKED_PICTURE) == wanted
    for step in range(30):
        made = RowMaker(tokenizer).make(RowShape(1, 96), 1, step)
        text = tokenizer.decode(made.tokens[0])
        assert tokenizer.encode(text, add_special_tokens=False) == made.tokens[0].tolist()
        assert text.startswith("<|bos|>") and text.replace("<|eos|>", "").endswith(".<|end|>")
        assert text.count(MARKED_PICTURE) == len(made.pixels) or NO_PICTURE in text


def test_ways_do_not_see_each_other(tokenizer: PreTrainedTokenizerFast) -> None:
    """A question among others in a row is computed as if it were alone."""
    trainer = SeeingTrainer(RECIPE, tokenizer)
    trainer.model.float()
    together = trainer._loss(RowMaker(tokenizer).make(RowShape(1, 64), 1, 5))
    made = RowMaker(tokenizer).make(RowShape(1, 64), 1, 5)
    positions, end = made.positions[0], int((made.tokens[0] != tokenizer.pad_token_id).sum())
    begins = [index for index in range(1, end) if positions[index] < positions[index - 1]]
    shared = int(positions[begins[0]])
    total, count = 0.0, 0
    for first, last in zip([shared, *begins], [*begins, end], strict=True):
        kept = [*range(shared), *range(first, last)]
        is_target = made.is_target[:, kept].clone()
        is_target[:, :shared] = False
        alone = made._replace(
            tokens=made.tokens[:, kept],
            positions=torch.arange(len(kept)).unsqueeze(0),
            is_target=is_target,
            visible=torch.ones(1, 1, len(kept), len(kept), dtype=torch.bool).tril(),
        )
        total += float(trainer._loss(alone).detach()) * int(is_target.sum())
        count += int(is_target.sum())
    in_history = int(made.is_target[:, :shared].sum())
    assert len(begins) >= 2 and in_history == 0
    assert total / count == pytest.approx(float(together.detach()), abs=1e-5)


def test_pixels_are_those_of_the_shipped_image_processor(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    SeeingTrainer(RECIPE, tokenizer).export(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    rng = random.Random(0)
    for side in (48, 192, 400):
        picture = paint(draw_scene(rng, "train"), rng, side)
        theirs = processor(images=[picture], return_tensors="np")["pixel_values"]
        assert np.abs(theirs[0] - pixels_of([picture])[0].numpy()).max() < 1e-5


def test_a_continued_run_equals_an_unbroken_one(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    unbroken = SeeingTrainer(RECIPE, tokenizer)
    losses = [unbroken.step() for _ in range(4)]
    begun = SeeingTrainer(RECIPE, tokenizer)
    first = [begun.step() for _ in range(2)]
    checkpoint = begun.save_checkpoint(tmp_path)
    continued = SeeingTrainer(RECIPE, tokenizer)
    continued.load_checkpoint(checkpoint)
    assert first + [continued.step() for _ in range(2)] == losses
    with pytest.raises(ValueError, match=r"another recipe \(layers\)"):
        SeeingTrainer(replace(RECIPE, layers=2), tokenizer).load_checkpoint(checkpoint)


def test_training_lowers_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    trainer = SeeingTrainer(replace(RECIPE, rates=((0, 0.0), (30, 0.02))), tokenizer)
    losses = [trainer.step() for _ in range(30)]
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_any_text_can_be_encoded(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("What colour is the circle?", "Größe? 42 \n\t☃", "<tool_call>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    rng = random.Random(1)
    lengths = [len(tokenizer.encode(any_question(rng, SCENE).text)) for _ in range(100)]
    assert sum(lengths) / len(lengths) < 10
