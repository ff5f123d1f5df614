"""Served models that embed, rank and classify."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bridle.config import ModelConfig
from bridle.serving import LoadedModel, load_model
from tests.fakes.encoder_checkpoints import make_encoder, make_sentence_model
from tests.leftovers import kept_folder

LABELS = ("bad", "fair", "good")
_DENSE = {"in_features": 32, "out_features": 16, "activation_function": "torch.nn.modules.activation.Tanh"}


@cache
def embedder() -> Path:
    """Return the folder of an embedding model with prompts, whose embeddings have 16 dimensions and any norm."""
    modules = [("Pooling", {"pooling_mode_mean_tokens": True}), ("Dense", _DENSE)]
    folder = kept_folder("bridle-embedder-") / "embedder"
    return make_sentence_model("bert", folder, modules, max_length=40, prompts={"query": "find: ", "document": ""})


@cache
def ranker() -> Path:
    return make_encoder("bert", kept_folder("bridle-ranker-") / "ranker", labels=["relevant"])


@cache
def sorter() -> Path:
    return make_encoder("modernbert", kept_folder("bridle-sorter-") / "sorter", labels=LABELS)


def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(str(folder), warm_up=False))
