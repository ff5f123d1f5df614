"""Reads the pooling settings of a model folder: whether the model computes vectors or labels for texts, and how. Does
not import torch.

A folder holds an embedding model if sentence-transformers saved it, or if its model is an encoder or a decoder without
a head. A folder holds a classifier if its configuration names a classifier class. All models without these properties
generate text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bridle.errors import UnsupportedModel
from bridle.gguf.pointer import weights_of
from bridle.model.checkpoint import read_json
from bridle.model.pooling.modules import ACTIVATIONS, Module, Normalize, PoolingLayer, has_modules, read_modules

Activation = Literal["softmax", "sigmoid", "identity"]

#: Families of encoders, with their number of token types if the configuration does not state it.
ENCODERS = {
    "albert": 2,
    "bert": 2,
    "camembert": 2,
    "deberta": 1,
    "deberta-v2": 1,
    "distilbert": 1,
    "electra": 2,
    "ernie": 4,
    "eurobert": 1,
    "gte": 1,
    "jina_embeddings_v3": 2,
    "modernbert": 1,
    "mpnet": 1,
    "nomic_bert": 2,
    "roberta": 2,
    "xlm-roberta": 2,
    "xlm-roberta-xl": 1,
}
_CLASSIFIER = "ForSequenceClassification"
#: Heads that give a result for each token, or each pair of words.
_OTHER_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")
_MAX_LABELS = 10_000
_MAX_PROMPTS = 256
#: The two texts of a pair have the types 0 and 1.
_MAX_TYPES = 2


@dataclass(frozen=True, slots=True)
class Pooling:
    """The settings by which a model turns a text into one vector.

    `modules` are applied to the hidden states; in a classifier they come before the classifier head. A classifier has
    `labels`, and applies `activation` to its logits to get scores. Texts have at most `max_length` tokens (None:
    limited only by the model's positions). Texts are converted to lower case if `lowered` is set. A request may name
    one of `prompts`, which is put before its text; otherwise `default_prompt` is put before the text. `dimensions` are
    the lengths to which vectors may be cut (empty: any). There are `num_types` token types, and the second text of a
    pair has another type than the first. In the second text, a token is given as its id plus the vocabulary's size.
    """

    task: Literal["embed", "classify"]
    modules: tuple[Module, ...] = (PoolingLayer(), Normalize())
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    max_length: int | None = None
    lowered: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dimensions: tuple[int, ...] = ()
    num_types: int = 1

    @property
    def is_unit(self) -> bool:
        """Return whether the model's vectors have length 1."""
        return bool(self.modules) and isinstance(self.modules[-1], Normalize)


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling settings of the model in `folder`; None if the model generates text. Raises `UnsupportedModel`
    for a folder whose vectors would be wrong."""
    if weights_of(folder) is not None:  # GGUF files
        return None
    config = read_json(folder / "config.json")
    architecture = _architecture(config)
    family = str(config.get("model_type", ""))
    for head in _OTHER_HEADS:
        if architecture.endswith(head):
            raise UnsupportedModel(f"{folder} is a {architecture}, which gives neither a vector nor a label for a text")
    if architecture.endswith(_CLASSIFIER):
        return _read_classifier(config, family)
    has_head = not architecture.endswith("Model") or architecture.endswith("LMHeadModel")
    is_encoder = family in ENCODERS and not config.get("is_decoder")
    if has_modules(folder):
        return _read_sentence_model(folder, config, family)
    if is_encoder or (architecture and not has_head):
        modules = (PoolingLayer(("mean",) if is_encoder else ("lasttoken",)), Normalize())
        return Pooling("embed", modules, dimensions=_dimensions(config), num_types=_num_types(config, family))
    return None


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _num_types(config: dict[str, Any], family: str) -> int:
    count = config.get("type_vocab_size", ENCODERS.get(family, 1))
    return max(1, min(count, _MAX_TYPES)) if isinstance(count, int) else 1


# -- classifiers ---------------------------------------------------------------------------------------------


def _read_classifier(config: dict[str, Any], family: str) -> Pooling:
    labels = _labels(config)
    default: Activation = "softmax"
    if len(labels) == 1 or config.get("problem_type") == "multi_label_classification":
        default = "sigmoid"
    if config.get("problem_type") == "regression":
        default = "identity"
    activation = _activation(config) or default
    return Pooling("classify", (), labels, activation, num_types=_num_types(config, family))


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if not isinstance(names, dict):
        count = config.get("num_labels", 2)
        count = min(count, _MAX_LABELS + 1) if isinstance(count, int) else 0
        names = {str(number): f"LABEL_{number}" for number in range(count)}
    if not 0 < len(names) <= _MAX_LABELS or set(names) != {str(number) for number in range(len(names))}:
        raise UnsupportedModel(f"config.json has {len(names)} labels; must be 1 to {_MAX_LABELS}, numbered from 0")
    return tuple(str(names[str(number)]) for number in range(len(names)))


def _activation(config: dict[str, Any]) -> Activation | None:
    """Return the activation that sentence-transformers applies to a cross-encoder's logits; None if the folder does not
    configure it."""
    told = config.get("sentence_transformers")
    name = told.get("activation_fn") if isinstance(told, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    found = ACTIVATIONS.get(str(name))
    if found == "sigmoid":
        return "sigmoid"
    if found == "identity":
        return "identity"
    raise UnsupportedModel(f"config.json has the activation {str(name)[:200]!r}; known are Sigmoid and Identity")


# -- sentence-transformers -----------------------------------------------------------------------------------


def _read_sentence_model(folder: Path, config: dict[str, Any], family: str) -> Pooling:
    own = read_json(folder / "sentence_bert_config.json")
    told = read_json(folder / "config_sentence_transformers.json")
    length = own.get("max_seq_length")
    prompts = _prompts(folder, told)
    default = told.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise UnsupportedModel(f"{folder} has no prompt {str(default)[:200]!r}, but names it as the default prompt")
    return Pooling(
        "embed",
        read_modules(folder),
        max_length=length if isinstance(length, int) and length > 0 else None,
        lowered=own.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt=default,
        dimensions=_dimensions(config),
        num_types=_num_types(config, family),
    )


def _prompts(folder: Path, told: dict[str, Any]) -> dict[str, str]:
    prompts = told.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UnsupportedModel(f"{folder / 'config_sentence_transformers.json'} has prompts that are not strings")
    if len(prompts) > _MAX_PROMPTS:
        raise UnsupportedModel(f"{folder} has {len(prompts)} prompts; at most {_MAX_PROMPTS}")
    return prompts


def _dimensions(config: dict[str, Any]) -> tuple[int, ...]:
    sizes = config.get("matryoshka_dimensions")
    known = isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes)
    return tuple(sorted(sizes)) if known and sizes else ()
