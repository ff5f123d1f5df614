"""Tests of the operator's adapter settings. Only these settings decide the meaning of a name from a client."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.config import ModelConfig
from bridle.errors import AdapterRefused, InvalidRequest
from bridle.serving import AdapterSet, AdapterSpec, ModelSet, build_registry, parse_adapter, parse_adapters
from bridle.serving.lora.lora_config import AdapterCatalog, is_revision
from tests.serving.fake_adapters import AdapterFakes, write_adapter


def test_names_and_sources_are_told_apart(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "with=sign@v1")
    assert parse_adapter(f"french={folder}") == AdapterSpec("french", str(folder))
    assert parse_adapter(str(folder)) == AdapterSpec("with=sign@v1", str(folder))
    assert parse_adapter("owner/name") == AdapterSpec("owner/name", "owner/name")
    assert parse_adapter(" owner/name@v1 ") == AdapterSpec("owner/name", "owner/name", "v1")
    assert parse_adapter("a=owner/name@feature/x") == AdapterSpec("a", "owner/name", "feature/x")
    assert parse_adapter("org/model:a = owner/name") == AdapterSpec("a", "owner/name", None, "org/model")


@pytest.mark.parametrize(
    "text",
    ["", "=", "=x/y", "a=", ":=x/y", "a=b/c=d", "b/c@v1@v2", "a=/nowhere", "../x/y", "a=b/..", "a=b/c@", "a=b/c@../v"],
)
def test_what_is_neither_folder_nor_hub_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"adapter is .* must be"):
        parse_adapter(text)


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x")
    assert len(parse_adapters([f"a={folder}", f"b={folder}", f"m:a={folder}"])) == 3
    with pytest.raises(InvalidRequest, match="two adapters have the name 'a'"):
        parse_adapters([f"a={folder}", f"a={folder}"])


@pytest.mark.parametrize("text", ["", "..", "a/../b", "a//b", "/a", "a/", "a b", "a\n", "x" * 101, "-x", "~"])
def test_revisions_are_names(text: str) -> None:
    assert is_revision("v1.0") and is_revision("feature/x") and is_revision("0f" * 20)
    assert not is_revision(text)


# -- what may be loaded later ------------------------------------------------------------------------------------


def test_sources_from_the_network_are_looked_up_never_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "adapters", write_adapter(tmp_path / "outside")
    good, deep = write_adapter(root / "good"), write_adapter(root / "team" / "deep")
    (root / "link").symlink_to(outside)
    leaky = write_adapter(root / "leaky")
    (leaky / "more.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (tmp_path / "shortcut").symlink_to(root)
    catalog = AdapterCatalog(AdapterSet(folder=tmp_path / "shortcut"))
    assert catalog.names() == ["good", "team/deep"]
    for source in ("good", str(good), f"{good}/", str(tmp_path / "shortcut" / "good")):
        assert catalog.find(source) == AdapterSpec("good", str(good))
    assert catalog.find("team/deep") == AdapterSpec("team/deep", str(deep))
    hostile = ["link", "leaky", str(outside), "..", "", "/", "good/..", "../outside", f"{root}/../outside", f"{root}/"]
    hostile += ["good\x00", "~", "file://" + str(good), "good@main", "x" * 5000, "/etc", str(root)]
    assert [source for source in hostile if catalog.find(source) is not None] == []
    assert catalog.find("good", "v1") is None


def test_hub_ids_are_those_allowed_at_the_revision_allowed() -> None:
    catalog = AdapterCatalog(AdapterSet(hub_ids=("org/any", "org/one@v1")))
    assert catalog.names() == ["org/any", "org/one"]
    assert catalog.find("org/any") == AdapterSpec("org/any", "org/any")
    assert catalog.find("org/any", "v2") == catalog.find("org/any@v2") == AdapterSpec("org/any", "org/any", "v2")
    assert catalog.find("org/one") == catalog.find("org/one@v1") == AdapterSpec("org/one", "org/one", "v1")
    refused = ["org/one@v2", "org/other", "org/any@../x", "org/any@a@b", "org/any@"]
    assert [source for source in refused if catalog.find(source) is not None] == []
    assert catalog.find("org/one", "v2") is None
    for text in ("name", "../x/y", "org/x@", "org/x@a@b"):
        with pytest.raises(InvalidRequest, match="allow_adapter is"):
            AdapterCatalog(AdapterSet(hub_ids=(text,)))


def test_without_a_folder_or_ids_nothing_is_loadable(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x")
    catalog = AdapterCatalog(AdapterSet((AdapterSpec("x", str(folder)),)))
    assert catalog.names() == [] and catalog.find(str(folder)) is None and catalog.find("org/x") is None
    with pytest.raises(InvalidRequest, match=r"adapters_dir .* cannot be used"):
        AdapterCatalog(AdapterSet(folder=tmp_path / "nowhere"))


# -- with models -------------------------------------------------------------------------------------------------


def test_models_come_with_their_adapters(tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "x"))
    named = (AdapterSpec("a", folder), AdapterSpec("b", folder, model="two"), AdapterSpec("c", folder, model="late"))
    loader = AdapterFakes({"one": 1, "two": 1, "late": 1})
    models = ModelSet(("one", "two"), allow_hub=("late",), max_memory=100 << 20)
    registry, load_named = build_registry(
        models, ModelConfig("one", kv_memory=1 << 20), loader, None, AdapterSet(named)
    )
    load_named()
    assert {model.name: [info.name for info in model.adapters.list()] for model in registry} == {
        "one": ["a"],
        "two": ["b"],
    }
    assert all(info.state == "host" for model in registry for info in model.adapters.list())
    assert registry.choose("a") == ("one", "a") and registry.choose("b") == ("two", "b")
    assert registry.choose("one", "a") == ("one", "a") and registry.choose(None) == (None, None)


def test_a_model_whose_adapter_cannot_be_used_does_not_come(tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "wide", rank=100))
    loader = AdapterFakes({"one": 1})
    models = ModelSet(("one",))
    registry, load_named = build_registry(
        models, ModelConfig("one"), loader, None, AdapterSet((AdapterSpec("a", folder),))
    )
    with pytest.raises(AdapterRefused, match="the rank is 100"):
        load_named()
    assert loader.models["one"].client.closed_with is not None  # type: ignore[attr-defined]
    assert len(registry) == 0


@pytest.mark.parametrize(
    ("spec", "models", "match"),
    [
        (AdapterSpec("one", "x"), ModelSet(("one",)), "an adapter has the name 'one', which is the name of a model"),
        (AdapterSpec("tgi", "x"), ModelSet(("one",)), "an adapter has the name 'tgi', which is the name of a model"),
        (
            AdapterSpec("a", "x"),
            ModelSet(("auto",), allow_hub=("late",), max_memory=1 << 20),
            "the model is missing",
        ),
        (AdapterSpec("a", "x", model="two"), ModelSet(("one",)), "the model 'two' is not served"),
    ],
)
def test_adapters_that_contradict_the_models_are_refused(spec: AdapterSpec, models: ModelSet, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        build_registry(models, ModelConfig(), AdapterFakes({}), None, AdapterSet((spec,)))


def test_a_model_cannot_take_an_adapters_name_later() -> None:
    adapters = AdapterSet((AdapterSpec("a", "x"),))
    registry, _ = build_registry(ModelSet(("one",)), ModelConfig(), AdapterFakes({"one": 1}), None, adapters)
    with pytest.raises(InvalidRequest, match="the model name 'a' is the name of an adapter"):
        registry.add_alias("a", "one")


def test_static_loads_no_adapters_later(tmp_path: Path) -> None:
    for adapters in (AdapterSet(folder=tmp_path), AdapterSet(hub_ids=("org/x",))):
        with pytest.raises(InvalidRequest, match="leave adapters_dir and allow_adapter out"):
            build_registry(ModelSet(("one",), is_static=True), ModelConfig(), AdapterFakes({}), None, adapters)
