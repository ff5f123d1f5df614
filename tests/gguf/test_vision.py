"""Tests that GGUF models with a vision tower in a separate file give transformers' logits, also with images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from bridle.config import ModelConfig
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.gguf.pointer import tower_of
from bridle.model.executor import LocalExecutor
from bridle.model.hub_lookup import resolve_model
from bridle.model.language_model import LanguageModel
from bridle.model.loading import load_executor
from bridle.multimodal import open_reader
from bridle.serving.models.export import quantize_model
from bridle.tokenizer import Tokenizer
from tests.fakes import vision_checkpoints
from tests.gguf.kit import load, logits, rewritten
from tests.model.driver import skip_older
from tests.model.image_prompts import DELTA_LIMIT, LIMIT, Eyes, error, make_ready, run_packed

SOURCES = Path(os.environ.get("BRIDLE_LLAMACPP_SOURCES", os.devnull))
#: The converter knows tokenizers by the tokens of a text, and not the tiny one.
_SCRIPT = """
import json, sys
from pathlib import Path
import torch, transformers
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
import gguf, conversion
from conversion.base import ModelBase, ModelType, TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
names = gguf.get_tensor_name_map  # which takes the numbers of a projector's layers for those of blocks
gguf.get_tensor_name_map = lambda arch, count: names(arch, max(count, 8))
with torch.inference_mode():
    for folder in map(Path, json.loads(sys.argv[2])):
        for what, name in ((ModelType.TEXT, "model.gguf"), (ModelType.MMPROJ, "mmproj.gguf")):
            arch = conversion.get_model_architecture(ModelBase.load_hparams(folder, False), what)
            kind = conversion.get_model_class(arch, mmproj=what is ModelType.MMPROJ)
            if what is ModelType.TEXT:
                kind.set_vocab, kind.no_mtp = TextModel._set_vocab_gpt2, True
            out = folder / "files"
            out.mkdir(exist_ok=True)
            kind(folder, gguf.LlamaFileType.ALL_F32, out / name, eager=True).write()
"""
CONVERTED = ("gemma3", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
#: What files are written from without the converter: the tower's kind, and the text's type.
WRITTEN = {"idefics3": "idefics3", "qwen3_5": "qwen3vl_merger"}
#: Converted files have the projection of Gemma 3 in float16.
_LIMITS = {"qwen3_5": DELTA_LIMIT, "gemma3": 1e-3}
_MEAN, _STD = [0.5, 0.4, 0.3], [0.5, 0.6, 0.7]


def seeing(family: str, folder: Path) -> Path:
    skip_older(family)
    fields = {"layer_types": ["sliding_attention"] * 2} if family == "gemma3" else {}  # as files have it
    made = Path(shutil.copytree(vision_checkpoints.make_seeing(family, folder / "made", **fields), folder / family))
    settings = json.loads((made / "preprocessor_config.json").read_text())
    settings |= {"image_mean": _MEAN, "image_std": _STD, "do_normalize": True, "image_seq_length": 4}
    (made / "preprocessor_config.json").write_text(json.dumps(settings))
    if family == "qwen2_5_vl":  # files do not say another width than that of published models
        config = json.loads((made / "config.json").read_text())
        config["vision_config"]["window_size"] = 112
        (made / "config.json").write_text(json.dumps(config))
    return made


def check_seen(original: Path, file: Path) -> None:
    """Compare logits of prompts with images with the original model in transformers, using the file's image
    processor."""
    family, unpacked = original.name, resolve_model(str(file))
    assert tower_of(unpacked) is not None
    reader, whole = open_reader(unpacked), AutoModelForImageTextToText.from_pretrained(original).eval()
    whole.set_attn_implementation("eager")
    assert reader is not None
    mine = Eyes(family, original, whole, reader, Tokenizer.load(unpacked))
    executor = load_executor(ModelConfig(str(file), dtype="float32", num_blocks=64, block_size=16))
    assert isinstance(executor, LocalExecutor)
    prompts = [mine.prompt("look ", mine.picture(1), " and ", mine.picture(2), " say"), mine.prompt("text here")]
    make_ready(executor, [medium for prompt in prompts for medium in prompt.media])
    for have, prompt in zip(run_packed(executor, prompts, (300,)), prompts, strict=True):
        assert error(have, mine.logits(prompt)) < _LIMITS.get(family, LIMIT)
    executor.close()


# -- files of the converter ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert all vision models in one process; return the root of the folders with checkpoints and files."""
    pytest.importorskip("sentencepiece")  # which the converter imports
    root = tmp_path_factory.mktemp("converted")
    folders = [seeing(name, root / f"of-{name}") for name in CONVERTED]
    for folder in folders:
        shutil.move(folder, root / folder.name)
    for name in ("idefics3", "smolvlm"):  # published configurations say it
        config = json.loads((root / name / "config.json").read_text())
        config["text_config"]["architectures"] = ["LlamaForCausalLM"]
        (root / name / "config.json").write_text(json.dumps(config))
    weights = root / "gemma3" / "model.safetensors"  # published files have longer names
    tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    names = json.dumps([str(root / name) for name in CONVERTED])
    subprocess.run([sys.executable, "-c", _SCRIPT, str(SOURCES), names], check=True, timeout=600)
    return root


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES.is_dir(), reason="BRIDLE_LLAMACPP_SOURCES names no folder of llama.cpp's sources")
@pytest.mark.parametrize("name", CONVERTED)
def test_converted_files_see_as_the_folder_does(name: str, converted: Path) -> None:
    check_seen(converted / name, converted / name / "files" / "model.gguf")


# -- files written here -------------------------------------------------------------------------------------


def _put_sizes(writer: Any, family: str, vision: Any, text: Any) -> None:
    from gguf import GGUFWriter

    assert isinstance(writer, GGUFWriter)
    writer.add_string("clip.projector_type", WRITTEN[family])
    sizes = {
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "block_count": vision.num_hidden_layers,
        "attention.head_count": vision.num_attention_heads,
        "image_size": getattr(vision, "image_size", 16),
        "patch_size": vision.patch_size,
        "projection_dim": text.hidden_size,
        **({"projector.scale_factor": 2, "preproc_image_size": 32} if family == "idefics3" else {}),
    }
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", _MEAN)
    writer.add_array("clip.vision.image_std", _STD)


def _tensors(family: str, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield llama.cpp's names and tensors for one weight of a vision tower."""
    changes = {
        "idefics3": (
            *(("vision_model.", "v."), ("embeddings.patch_embedding", "patch_embd"), ("encoder.layers", "blk")),
            *(("embeddings.position_embedding", "position_embd"), ("self_attn.out_proj", "attn_out")),
            *((f"self_attn.{each}_proj", f"attn_{each}") for each in "qkv"),
            *(("layer_norm", "ln"), ("mlp.fc1", "ffn_up"), ("mlp.fc2", "ffn_down"), ("post_layernorm", "post_ln")),
            ("connector.modality_projection.proj", "mm.model.fc"),
        ),
        "qwen3_5": (
            *(("visual.merger.norm", "v.post_ln"), ("visual.merger.linear_fc1", "mm.0")),
            *(("visual.merger.linear_fc2", "mm.2"), ("visual.", "v."), ("patch_embed.proj", "patch_embd")),
            *(("pos_embed", "position_embd"), ("blocks.", "blk."), ("norm", "ln"), ("attn.qkv", "attn_qkv")),
            *(("attn.proj", "attn_out"), ("mlp.linear_fc1", "ffn_up"), ("mlp.linear_fc2", "ffn_down")),
        ),
    }[family]
    for before, after in changes:
        name = name.replace(before, after)
    if tensor.dim() == 5:
        yield name, tensor[:, :, 0]
        yield f"{name}.1", tensor[:, :, 1]
    else:
        yield name, tensor


def write_files(original: Path, folder: Path) -> Path:
    """Write a model's text part as a GGUF file, and its vision tower as a second file in the same folder."""
    from gguf import GGUFWriter

    family, whole = original.name, AutoModelForImageTextToText.from_pretrained(original, dtype=torch.float32)
    language = LanguageModel(whole)
    text = AutoModelForCausalLM.from_config(language.config)
    weights = {f"model.{name}": each for name, each in language.model.state_dict().items()}
    text.load_state_dict({**weights, "lm_head.weight": language.lm_head.weight})
    text.save_pretrained(folder / "text")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (original / name).is_file():
            shutil.copy(original / name, folder / "text" / name)
    file = folder / "files" / "model.gguf"
    file.parent.mkdir()
    quantize_model(str(folder / "text"), file, "F32")
    writer = GGUFWriter(folder / "files" / "mmproj-model.gguf", "clip")
    _put_sizes(writer, family, whole.config.vision_config, language.config)
    own = {id(each) for each in language.parameters()}
    for name, parameter in whole.model.named_parameters():
        if id(parameter) not in own:
            for each, tensor in _tensors(family, name, parameter.detach()):
                writer.add_tensor(each, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    found: dict[str, tuple[Path, Path]] = {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in found:
            root = tmp_path_factory.mktemp(family)
            original = seeing(family, root)
            found[family] = original, write_files(original, root)
        return found[family]

    return make


@pytest.mark.parametrize("family", WRITTEN)
def test_written_files_see_as_the_folder_does(family: str, made: Any) -> None:
    original, file = made(family)
    check_seen(original, file)
    settings = json.loads((resolve_model(str(file)) / "preprocessor_config.json").read_text())
    assert settings["image_mean"] == pytest.approx(_MEAN) and settings["image_std"] == pytest.approx(_STD)


def test_a_tower_elsewhere_is_named(made: Any, tmp_path: Path) -> None:
    _, file = made("idefics3")
    alone = Path(shutil.copy(file, tmp_path / "model.gguf"))
    assert tower_of(resolve_model(str(alone))) is None
    tower = file.with_name("mmproj-model.gguf")
    assert tower_of(resolve_model(str(alone), mmproj=str(tower))) == tower.resolve()
    assert torch.equal(logits(load(alone)), logits(load(file)))


def test_several_towers_are_not_chosen_from(made: Any, tmp_path: Path) -> None:
    _, file = made("idefics3")
    shutil.copytree(file.parent, tmp_path / "files")
    shutil.copy(file.with_name("mmproj-model.gguf"), tmp_path / "files" / "mmproj-other.gguf")
    assert tower_of(resolve_model(str(tmp_path / "files" / "model.gguf"))) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"clip.projector_type": "resampler"}}, "projector type 'resampler'; known are gemma3"),
        ({"metadata": {"clip.projector_type": "gemma3"}}, "does not fit"),
        ({"metadata": {"clip.vision.projection_dim": 48}}, "another embedding size"),
        ({"without": ("block_count",)}, "block_count is None"),
    ],
)
def test_towers_that_do_not_fit_are_refused(changes: Any, message: str, made: Any, tmp_path: Path) -> None:
    _, file = made("idefics3")
    shutil.copytree(file.parent, tmp_path / "files")
    kept = {**changes, "without": (*changes.get("without", ()), *changes.get("metadata", {}))}
    changed = rewritten(tmp_path / "files" / "mmproj-model.gguf", "changed", **kept)
    model = str(tmp_path / "files" / "model.gguf")
    with pytest.raises(UnsupportedModel, match=message):
        resolve_model(model, mmproj=str(changed))
    (tmp_path / "files" / "mmproj-model.gguf").unlink()
    assert tower_of(resolve_model(model)) is None  # next to a model it is only left out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": ("v.post_ln.bias",)}, "lacks the weight 'vision_model.post_layernorm.bias'"),
        ({"tensors": {"v.more": torch.ones(3)}}, "that are not used, such as 'v.more'"),
        ({"metadata": {"clip.vision.feed_forward_length": 48}}, "but its metadata implies"),
    ],
)
def test_weights_of_a_tower_must_be_all(changes: Any, message: str, made: Any, tmp_path: Path) -> None:
    _, file = made("idefics3")
    shutil.copytree(file.parent, tmp_path / "files")
    kept = {**changes, "without": (*changes.get("without", ()), *changes.get("metadata", {}))}
    changed = rewritten(tmp_path / "files" / "mmproj-model.gguf", "changed", **kept)
    config = ModelConfig(str(tmp_path / "files" / "model.gguf"), mmproj=str(changed), num_blocks=16)
    with pytest.raises(UnsupportedModel, match=message):
        load_executor(config)


@pytest.mark.parametrize("content", ["tokenizer.json", "model-00002-of-00002.gguf"])
def test_a_tower_for_a_folder_without_a_first_file_is_refused(content: str, tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    (folder / content).touch()
    (tower := tmp_path / "mmproj.gguf").touch()
    with pytest.raises(InvalidRequest, match=r"mmproj: got .*; it needs a GGUF file, but .*model' is a folder"):
        resolve_model(str(folder), mmproj=str(tower))


def test_a_tower_for_what_is_no_file_is_refused(made: Any) -> None:
    original, file = made("idefics3")
    with pytest.raises(InvalidRequest, match=r"mmproj: got .*; it needs a GGUF file"):
        resolve_model(str(original), mmproj=str(file))
    with pytest.raises(InvalidRequest, match=r"mmproj: got 'nowhere\.gguf'; there is no such file"):
        resolve_model(str(file), mmproj="nowhere.gguf")
