"""Training: an interrupted run equals an unbroken one, and what it writes is a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lab.demo.batches import BatchShape, make_batch
from lab.demo.optimizer import orthogonalize
from lab.demo.tokenizer import train_tokenizer
from lab.demo.trainer import Recipe, Trainer, checkpoints

SHAPE = BatchShape(rows=2, length=96, long_rows=1, long_length=256, long_every=3)
RECIPE = Recipe(
    rates=((0, 0.0), (2, 0.02), (6, 0.0)),
    hidden_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate_size=48,
    tokenizer_documents=200,
    shape=SHAPE,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(RECIPE.seed, RECIPE.tokenizer_documents)


def test_a_continued_run_equals_an_unbroken_one(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    unbroken = Trainer(RECIPE, tokenizer)
    losses = [unbroken.step() for _ in range(6)]

    begun = Trainer(RECIPE, tokenizer)
    first = [begun.step() for _ in range(3)]
    checkpoint = begun.save_checkpoint(tmp_path)
    continued = Trainer(RECIPE, tokenizer)
    continued.load_checkpoint(checkpoint)
    assert continued.num_done == 3
    assert first + [continued.step() for _ in range(3)] == losses
    for name, tensor in unbroken.optimizer.state().items():
        assert torch.equal(tensor, continued.optimizer.state()[name]), name


def test_training_lowers_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    trainer = Trainer(replace(RECIPE, rates=((0, 0.0), (40, 0.02))), tokenizer)
    losses = [trainer.step() for _ in range(40)]
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_only_the_newest_checkpoints_are_kept(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = Trainer(RECIPE, tokenizer)
    for trainer.num_done in (1, 2, 3):
        trainer.save_checkpoint(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    assert {path.name for path in checkpoints(tmp_path)[0].iterdir()} == {
        "optimizer.safetensors",
        "state.json",
    }


def test_a_checkpoint_of_another_recipe_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    checkpoint = Trainer(RECIPE, tokenizer).save_checkpoint(tmp_path)
    other = Trainer(replace(RECIPE, seed=2), tokenizer)
    with pytest.raises(ValueError, match=r"another recipe \(seed\)"):
        other.load_checkpoint(checkpoint)
    Trainer(RECIPE, tokenizer).load_checkpoint(checkpoint)


def test_the_export_computes_what_the_trainer_does(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = Trainer(RECIPE, tokenizer)
    trainer.step()
    trainer.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = torch.tensor([[0, 5, 6, 7, 8]])
    assert torch.equal(loaded(tokens).logits, trainer.model(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_batches_follow_from_the_step_and_are_well_formed(tokenizer: PreTrainedTokenizerFast) -> None:
    for step in range(6):
        batch = make_batch(tokenizer, SHAPE, 1, step)
        assert batch.tokens.shape == ((1, 256) if step % 3 == 2 else (2, 96))
        assert torch.equal(batch.tokens, make_batch(tokenizer, SHAPE, 1, step).tokens)
        assert not batch.is_target[:, 0].any()
        assert batch.is_target.any()
    assert not torch.equal(make_batch(tokenizer, SHAPE, 1, 0).tokens, make_batch(tokenizer, SHAPE, 1, 1).tokens)


def test_the_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(rates=((0, 0.0), (10, 1.0), (50, 1.0), (100, 0.0)))
    assert recipe.steps == 100
    assert [recipe.lr_at(step) for step in (0, 9, 49, 74, 99)] == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonalizing_evens_out_the_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.4
    assert values.max() < 1.4
