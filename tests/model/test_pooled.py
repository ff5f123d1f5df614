"""Tests of pooling models: each text in a packed step gets what transformers' eager pass gives for the text alone."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification

from bridle.config import ModelConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan
from bridle.engine.warm_up import warm_up
from bridle.errors import InternalError, InvalidRequest, UnsupportedModel
from bridle.llm import LLM
from bridle.model.loading import load_executor
from bridle.model.pooling.executor import PooledExecutor
from bridle.model.pooling.model import PooledModel
from bridle.model.pooling.self_test import check_packing, compare_with_eager
from bridle.model.pooling.settings import read_pooling
from bridle.sampling import DEFAULT_SAMPLING
from tests.conftest import examples
from tests.distributed.kit import hosted
from tests.fakes.encoder_checkpoints import make_encoder, make_sentence_model
from tests.leftovers import kept_folder

TEXTS = [[1, 5, 6, 7, 2], [1, 9, 2], list(range(1, 60)), [1, 5, 6, 8, 2], [1, 100, 2], [8]]
_SLOW = [
    pytest.param(family, marks=pytest.mark.slow)
    for family in ("camembert", "distilbert", "electra", "ernie", "gemma2", "gte", "mistral", "nomic_bert", "qwen2")
]
FAMILIES = ["bert", "roberta", "xlm-roberta", "modernbert", "mpnet", "deberta", "deberta-v2", "llama", "qwen3", *_SLOW]
DECODERS = ("gemma2", "llama", "mistral", "qwen2", "qwen3")


def texts_of(family: str) -> list[list[int]]:
    """Return the texts for a family; MPNet's lack token 1, which transformers takes for padding despite the
    configuration."""
    return [[3 if token == 1 else token for token in text] for text in TEXTS] if family == "mpnet" else TEXTS


def load(folder: Path, **options: Any) -> PooledExecutor:
    executor = load_executor(ModelConfig(str(folder), warm_up=False, **options))
    assert isinstance(executor, PooledExecutor)
    return executor


def model_of(executor: PooledExecutor) -> PooledModel:
    model = executor._model
    assert model is not None
    return model


def states(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Return the hidden states [L, hidden] of each text by transformers."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([text])).last_hidden_state[0] for text in texts]


@pytest.mark.few(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_the_library(family: str, tmp_path: Path) -> None:
    folder = make_encoder(family, tmp_path / "model")
    executor, texts = load(folder), texts_of(family)
    found = model_of(executor).run(texts)
    rows = states(folder, texts)
    pooled = [row[-1] if family in DECODERS else row.mean(0) for row in rows]
    want = functional.normalize(torch.stack(pooled), dim=-1)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    assert executor.info.task == "embed" and executor.info.embedding_size == want.shape[1]


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_library(family: str, tmp_path: Path) -> None:
    folder = make_encoder(family, tmp_path / "model", labels=["bad", "fair", "good"])
    executor, texts = load(folder), texts_of(family)
    found = model_of(executor).run(texts)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        want = torch.cat([classifier(torch.tensor([text])).logits for text in texts])
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)
    assert executor.info.task == "classify" and executor.info.embedding_size == 3


#: DeBERTa's configurations, beside that of its version 3: the second one's largest with its convolution and types, one
#: without buckets, one term alone, none.
DEBERTAS: list[tuple[str, dict[str, Any]]] = [
    (
        "deberta-v2",
        {"share_att_key": False, "conv_kernel_size": 3, "type_vocab_size": 2, "position_biased_input": True},
    ),
    ("deberta-v2", {"position_buckets": -1, "max_relative_positions": 24, "norm_rel_ebd": "none"}),
    ("deberta-v2", {"pos_att_type": ["c2p"]}),
    ("deberta-v2", {"relative_attention": False, "pos_att_type": []}),
    ("deberta", {"pos_att_type": ["p2c"], "max_relative_positions": 24, "type_vocab_size": 2}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "fields"), DEBERTAS)
def test_all_forms_of_relative_positions_are_computed(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Relative positions are right also for texts with more tokens than the model has distances or buckets."""
    folder = make_encoder(family, tmp_path / "model", **fields)
    texts = [*TEXTS, list(range(30, 150))]
    model = model_of(load(folder))
    want = torch.stack([row.mean(0) for row in states(folder, texts)])
    torch.testing.assert_close(model.run(texts), functional.normalize(want, dim=-1), rtol=0, atol=1e-5)
    for layer in model.base.encoder.layer:  # they matter
        for linear in (name for name in layer.attention.self.inner.named_parameters() if "pos" in name[0]):
            assert float(linear[1].abs().max()) > 0


def test_far_distances_matter_to_mpnet(tmp_path: Path) -> None:
    folder = make_encoder("mpnet", tmp_path / "model")
    texts = [list(range(10, 150)), [9, 8, 7]]
    found = model_of(load(folder)).run(texts)
    want = functional.normalize(torch.stack([row.mean(0) for row in states(folder, texts)]), dim=-1)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_heads_that_are_mixed_are_refused(tmp_path: Path) -> None:
    folder = make_encoder("deberta", tmp_path / "model", talking_head=True)
    with pytest.raises(UnsupportedModel, match="talking_head"):
        load(folder)


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_a_modernbert_classifier_pools_as_it_says(mode: str, tmp_path: Path) -> None:
    folder = make_encoder("modernbert", tmp_path / "model", labels=["no", "yes"], classifier_pooling=mode)
    found = model_of(load(folder)).run(TEXTS)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        want = torch.cat([classifier(torch.tensor([text])).logits for text in TEXTS])
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("head", "family"), [("AutoModelForMaskedLM", "bert"), ("AutoModelForMaskedLM", "modernbert")])
def test_a_masked_language_model_is_an_encoder_with_a_head_too_many(head: str, family: str, tmp_path: Path) -> None:
    folder = make_encoder(family, tmp_path / "model", head=head)
    found = model_of(load(folder)).run(TEXTS)
    pooled = torch.stack([row.mean(0) for row in states(folder, TEXTS)])
    torch.testing.assert_close(found, functional.normalize(pooled, dim=-1), rtol=0, atol=1e-5)


# -- packing -------------------------------------------------------------------------------------------------


@cache
def packed(family: str, labels: tuple[str, ...] | None = None) -> PooledModel:
    folder = make_encoder(family, kept_folder("bridle-pooled-") / "model", labels=labels)
    return model_of(load(folder))


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "deberta-v2", "qwen3"])
@settings(max_examples=examples(15), deadline=None)
@given(texts=st.lists(st.lists(st.integers(5, 299), min_size=1, max_size=40), min_size=1, max_size=12))
def test_a_text_gets_the_same_alone_and_among_others(family: str, texts: list[list[int]]) -> None:
    model = packed(family)
    together = model.run(texts)
    alone = torch.cat([model.run([text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_types_of_tokens_come_with_their_ids(tmp_path: Path) -> None:
    """The second text of a pair has token type 1, as in BERT's training; token ids above the vocabulary encode this
    type."""
    folder = make_encoder("bert", tmp_path / "model", labels=["score"])
    executor = load(folder)
    model = model_of(executor)
    assert executor.info.vocab_size == 2 * model.num_ids
    first, second = [1, 5, 6, 2], [7, 8, 9, 2]
    found = model.run([[*first, *(token + model.num_ids for token in second)], [*first, *second]])
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    ids, types = torch.tensor([[*first, *second]]), torch.tensor([[0] * 4 + [1] * 4])
    with torch.inference_mode():
        want = torch.cat([classifier(ids, token_type_ids=types).logits, classifier(ids).logits])
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)
    assert abs(float(found[0] - found[1])) > 1e-3


# -- sentence-transformers -----------------------------------------------------------------------------------

_POOL = {"word_embedding_dimension": 32}


def reference(rows: torch.Tensor, mode: str) -> torch.Tensor:
    """Pool hidden states [L, hidden] to a vector [hidden] as sentence-transformers defines it."""
    weights = torch.arange(1, len(rows) + 1).float()
    return {
        "cls_token": lambda: rows[0],
        "lasttoken": lambda: rows[-1],
        "mean_tokens": lambda: rows.sum(0) / len(rows),
        "max_tokens": lambda: rows.max(0).values,
        "mean_sqrt_len_tokens": lambda: rows.sum(0) / len(rows) ** 0.5,
        "weightedmean_tokens": lambda: (rows * weights[:, None]).sum(0) / weights.sum(),
    }[mode]()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "modes",
    [
        ("cls_token",),
        ("mean_tokens",),
        ("lasttoken",),
        ("max_tokens",),
        ("mean_sqrt_len_tokens",),
        ("weightedmean_tokens",),
        ("cls_token", "mean_tokens"),
    ],
)
def test_pooling_is_that_of_the_folder(modes: tuple[str, ...], tmp_path: Path) -> None:
    pooling = {**_POOL, **{f"pooling_mode_{mode}": True for mode in modes}}
    folder = make_sentence_model("bert", tmp_path / "model", [("Pooling", pooling)])
    found = model_of(load(folder)).run(TEXTS)
    want = torch.stack([torch.cat([reference(rows, mode) for mode in modes]) for rows in states(folder, TEXTS)])
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_modules_after_the_pooling_are_applied_in_order(tmp_path: Path) -> None:
    dense = {"in_features": 32, "out_features": 12, "bias": True}
    tanh, plain = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
    modules: list[tuple[str, dict[str, Any]]] = [
        ("Pooling", {**_POOL, "pooling_mode_mean_tokens": True}),
        ("Dense", {**dense, "activation_function": tanh}),
        ("LayerNorm", {"dimension": 12}),
        ("Dense", {"in_features": 12, "out_features": 8, "bias": False, "activation_function": plain}),
        ("Normalize", {}),
    ]
    folder = make_sentence_model("xlm-roberta", tmp_path / "model", modules)
    executor = load(folder)
    found = model_of(executor).run(TEXTS)
    one, norm, two = (load_file(folder / name / "model.safetensors") for name in ("2_Dense", "3_LayerNorm", "4_Dense"))
    vectors = torch.stack([rows.mean(0) for rows in states(folder, TEXTS)])
    vectors = torch.tanh(vectors @ one["linear.weight"].T + one["linear.bias"])
    vectors = functional.layer_norm(vectors, (12,), norm["norm.weight"], norm["norm.bias"])
    want = functional.normalize(vectors @ two["linear.weight"].T, dim=-1)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    assert executor.info.embedding_size == 8


def rewrite(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (("os.system", {}), "of the unknown type 'os.system'"),
        (("sentence_transformers.models.CNN", {}), "of the unknown type 'CNN'"),
        (("custom_st.Transformer", {}), "of the unknown type 'custom_st.Transformer'"),
        (("Dense", {"in_features": 16, "out_features": 4}), "needs vectors of size 16; the module before it gives 32"),
        (
            ("Dense", {"in_features": 32, "out_features": 4, "activation_function": "os.system"}),
            "activation 'os.system'",
        ),
        (("Pooling", {"pooling_mode_cls_token": True}), "more than one pooling module"),
    ],
)
def test_modules_that_are_not_known_are_refused_by_name(module: Any, message: str, tmp_path: Path) -> None:
    pooling = ("Pooling", {"pooling_mode_mean_tokens": True})
    folder = make_sentence_model("bert", tmp_path / "model", [pooling, module])
    with pytest.raises(UnsupportedModel, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("modules.json", lambda rows: rows[1].update(path="../elsewhere"), "outside of the model's"),
        ("modules.json", lambda rows: rows[1].update(path=".."), "outside of the model's"),
        ("modules.json", lambda rows: rows[0].update(path="0_Transformer"), "0_Transformer"),
        ("modules.json", lambda rows: rows[0].update(type="evil.Code"), "begins with evil.Code"),
        ("modules.json", lambda rows: rows.extend([rows[1]] * 40), "at most 16"),
        ("modules.json", lambda rows: rows.pop(), "has no pooling after"),
        ("1_Pooling/config.json", lambda config: config.clear(), "pools by nothing"),
        ("1_Pooling/config.json", lambda config: config.update(include_prompt=False), "include_prompt"),
        ("config_sentence_transformers.json", lambda c: c.update(default_prompt_name="x"), "no prompt 'x'"),
        ("config_sentence_transformers.json", lambda c: c.update(prompts={"x": 1}), "not strings"),
    ],
)
def test_a_hostile_folder_is_refused(file: str, change: Any, message: str, tmp_path: Path) -> None:
    folder = make_sentence_model("bert", tmp_path / "model")
    rewrite(folder / file, change)
    with pytest.raises(UnsupportedModel, match=message):
        read_pooling(folder)


def test_pickled_weights_of_a_module_are_not_read(tmp_path: Path) -> None:
    dense = ("Dense", {"in_features": 32, "out_features": 4})
    folder = make_sentence_model("bert", tmp_path / "model", [("Pooling", {"pooling_mode_cls_token": True}), dense])
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"has no model\.safetensors"):
        load(folder)


# -- what a folder is ----------------------------------------------------------------------------------------


def test_a_decoder_with_a_head_generates() -> None:
    from tests.fakes.tiny_checkpoints import cached_checkpoint

    assert read_pooling(cached_checkpoint("llama")) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "nor a label for a text"),
        ({"num_labels": 10**18, "architectures": ["BertForSequenceClassification"]}, "must be 1 to 10000"),
        ({"id2label": {"0": "a", "2": "b"}, "architectures": ["BertForSequenceClassification"]}, "numbered from 0"),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "sentence_transformers": {"activation_fn": "os.system"},
            },
            "activation 'os.system'",
        ),
    ],
)
def test_what_gives_other_things_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path / "model")
    rewrite(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(UnsupportedModel, match=message):
        read_pooling(folder)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 161}, InvalidRequest, "the model supports at most 160"),
        ({"quantization": "int8"}, InvalidRequest, "are not quantized"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(options: Any, error: Any, message: str, tmp_path: Path) -> None:
    folder = make_sentence_model("bert", tmp_path / "model", max_length=50)
    assert load(folder).info.max_model_len == 50  # what the folder says
    assert load(folder, max_model_len=70).info.max_model_len == 70
    with pytest.raises(error, match=message):
        load(folder, **options)


def test_a_family_whose_packed_pass_differs_is_refused(tmp_path: Path) -> None:
    """With wrong positions, the comparison with transformers' own pass refuses the model."""
    model = model_of(load(make_encoder("ernie", tmp_path / "model")))
    check_packing(model, "ernie", 160)
    model.position_offset = 3
    error, scale = compare_with_eager(model, 160)
    assert error > 1e-2 * scale
    with pytest.raises(UnsupportedModel, match="would give wrong vectors"):
        check_packing(model, "ernie", 160)


# -- behind Executor -----------------------------------------------------------------------------------------


def test_an_executor_gives_vectors_of_its_last_step() -> None:
    model = packed("bert")
    info = ExecutorInfo("tiny", 600, 160, 64, 16, kv="sequences", embedding_size=32, task="embed")
    executor = PooledExecutor(info, model, torch.device("cpu"))
    rows = [PlanRow(number, 0, len(text), new_tokens=tuple(text)) for number, text in enumerate(TEXTS)]
    executor.forward(StepPlan(4, rows))
    assert executor.sample(SampleBatch(4)).tokens == []
    found = executor.embed(4, [2, 0])
    want = model.run(TEXTS)
    torch.testing.assert_close(torch.tensor([vector.tolist() for vector in found]), want[[2, 0]], rtol=0, atol=1e-6)
    for wrong in (
        lambda: executor.forward(StepPlan(4)),
        lambda: executor.forward(StepPlan(5, [PlanRow(0, 3, 2, new_tokens=(1, 2))])),
        lambda: executor.embed(4, [6]),
        lambda: executor.embed(3, [0]),
        lambda: executor.sample(SampleBatch(4, [SampleRow(0, 0, DEFAULT_SAMPLING)])),
    ):
        with pytest.raises(InternalError):
            wrong()
    executor.reset()
    executor.forward(StepPlan(1, rows[:1]))
    executor.close()
    assert executor.num_bytes == 0


def test_many_texts_go_through_few_steps(tmp_path: Path) -> None:
    """Texts of all lengths up to the longest share a few steps, and vectors come in the order of the texts."""
    folder = make_encoder("roberta", tmp_path / "model")
    texts = [[5 + (number * 7 + place) % 290 for place in range(1 + number * 13 % 159)] for number in range(40)]
    texts.append([7] * 159)
    want = functional.normalize(torch.stack([rows.mean(0) for rows in states(folder, texts)]), dim=-1)
    with LLM(str(folder), max_num_batched_tokens=200) as llm:
        found = llm.embed(texts, use_tqdm=False)
        num_steps = llm.statistics().num_steps
        with pytest.raises(InvalidRequest, match="159"):
            llm.embed([[7] * 160], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="generates no text"):
            llm.generate("Hello", use_tqdm=False)
    torch.testing.assert_close(torch.tensor(found), want, rtol=0, atol=1e-5)
    total = sum(map(len, texts))
    assert total / 200 <= num_steps < len(texts)


def test_a_shard_gives_the_same_vectors_and_says_what_its_model_is_for(tmp_path: Path) -> None:
    executor = load(make_encoder("bert", tmp_path / "model", labels=["no", "yes"]))
    rows = [PlanRow(number, 0, len(text), new_tokens=tuple(text)) for number, text in enumerate(TEXTS)]
    executor.forward(StepPlan(1, rows))
    want = executor.embed(1, range(len(TEXTS)))
    with hosted(executor) as host:
        there = host.connect()
        assert there.info == executor.info and there.info.task == "classify"
        there.forward(StepPlan(1, rows))
        assert there.sample(SampleBatch(1)).tokens == []
        assert there.embed(1, range(len(TEXTS))) == want
        there.close()


def test_the_largest_step_is_run_without_a_draw(tmp_path: Path) -> None:
    found = warm_up(load(make_encoder("bert", tmp_path / "model")))
    assert found.num_tokens >= 1024 and found.num_seqs == 256


def test_a_draft_model_has_nothing_to_do(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path / "model")
    with pytest.raises(InvalidRequest, match="leave draft_model out"):
        load(folder, draft_model=str(folder))
