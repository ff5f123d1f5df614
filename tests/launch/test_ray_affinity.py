"""Tests of the choice of an engine and of the number of engines in a Ray cluster; they need no Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.distributed.prefix_router import RUNNING_TOKENS
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.launch.ray import RaySettings, build_app
from bridle.launch.ray.adapters import IngressLoRAStore
from bridle.launch.ray.affinity import Places
from bridle.launch.ray.autoscaling import QueuedTokens
from bridle.launch.replica_process import ReplicaConfig

PROMPT = tuple(range(64))
OTHER = tuple(range(100, 164))


def places(*names: str) -> Places[str]:
    made: Places[str] = Places(block_size=16, max_engines=8)
    made.keep(names)
    return made


def report(made: Places[str], number: int, **loads: float) -> None:
    for name, load in loads.items():
        made.note_report(name, {"number": number, "load": load, "is_ready": True})


def test_a_prompt_goes_where_its_beginning_is() -> None:
    made = places("a", "b", "c")
    home = made.rank(PROMPT, "", None, "abc")[0]
    assert all(made.rank((*PROMPT, i), "", None, "abc")[0] == home for i in range(5))
    report(made, 1, a=0, b=0, c=0)
    assert {made.rank(PROMPT, f"user {i}", None, "abc")[0] for i in range(9)} == {"a", "b", "c"}


def test_an_adapter_goes_where_it_is_loaded() -> None:
    made = places("a", "b", "c", "d")
    home = made.rank(PROMPT, "", "poet", "abcd")[0]
    prompts = [tuple(range(i, i + 20)) for i in range(0, 400, 40)]
    assert {made.rank(prompt, "", "poet", "abcd")[0] for prompt in prompts} == {home}
    report(made, 1, a=0, b=0, c=0, d=0)
    assert {made.rank(prompt, "", None, "abcd")[0] for prompt in prompts} == set("abcd")


def test_whoever_has_far_more_to_do_is_passed_over() -> None:
    made = places("a", "b")
    home = made.rank(PROMPT, "", "poet", "ab")[0]
    other = "ab".replace(home, "")
    report(made, 1, **{home: 100_000, other: 10})
    assert made.rank(PROMPT, "", "poet", "ab") == [other, home]
    report(made, 2, **{home: 10, other: 10})
    assert made.rank(OTHER, "", "poet", "ab")[0] in "ab"


def test_what_was_sent_counts_until_it_is_reported() -> None:
    made = places("a", "b")
    report(made, 1, a=0, b=5 * (64 + RUNNING_TOKENS) - 1)
    prompts = [tuple(range(i, i + 64)) for i in range(0, 1000, 100)]
    assert [made.rank(prompt, "", None, "ab")[0] for prompt in prompts[:6]] == ["a"] * 5 + ["b"]
    report(made, 1, a=0, b=0)  # the same report again is no news
    assert made.rank(prompts[6], "", None, "ab")[0] == "a"
    report(made, 2, a=10_000, b=0)
    assert made.rank(prompts[7], "", None, "ab")[0] == "b"


def test_one_that_is_not_ready_is_left_out_unless_all_are() -> None:
    made = places("a", "b")
    made.note_report("a", {"number": 1, "load": 0, "is_ready": False})
    assert {made.rank((i,) * 20, "", None, "ab")[0] for i in range(6)} == {"b"}
    made.note_report("b", {"number": 1, "load": 0, "is_ready": False})
    assert {made.rank((i,) * 20, "", None, "ab")[0] for i in range(20, 26)} == {"a", "b"}


def test_who_is_gone_is_forgotten() -> None:
    made = places("a", "b")
    home = made.rank(PROMPT, "", "poet", "ab")[0]
    left = "ab".replace(home, "")
    made.keep([left, "c"])
    assert home not in made.rank(PROMPT, "", "poet", [left, "c"])
    assert made.rank(PROMPT, "", None, []) == []


@given(
    steps=st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcdefgh"), min_size=1), st.integers(0, 5), st.sampled_from([None, "x", "y"])
        ),
        max_size=30,
    )
)
def test_every_candidate_is_ranked_once_whoever_comes_and_goes(
    steps: list[tuple[set[str], int, str | None]],
) -> None:
    made: Places[str] = Places(block_size=4, max_engines=8)
    for number, (names, prompt, adapter) in enumerate(steps):
        made.keep(names)
        report(made, number, **dict.fromkeys(sorted(names)[:2], 1000.0))
        assert sorted(made.rank((prompt,) * 20, "", adapter, names)) == sorted(names)


# -- how many ----------------------------------------------------------------------------------------------------


def wanted(queued: list[float], busy: list[float], low: int = 1, high: int = 8) -> int:
    metrics = {"queued_tokens": dict(enumerate(queued)), "busy_share": dict(enumerate(busy))}
    context: Any = SimpleNamespace(
        aggregated_metrics=metrics, capacity_adjusted_min_replicas=low, capacity_adjusted_max_replicas=high
    )
    return QueuedTokens(1000, 0.8)(context)[0]


@pytest.mark.parametrize(
    ("queued", "busy", "count"),
    [
        ([0, 0], [0, 0], 1),
        ([2500, 0], [0.1, 0.1], 3),
        ([900, 900], [0.2, 0.2], 2),
        ([0, 0], [1.0, 1.0], 3),
        ([1e9], [1.0], 8),
        ([], [], 1),
    ],
)
def test_engines_follow_queued_tokens_and_taken_places(queued: list[float], busy: list[float], count: int) -> None:
    assert wanted(queued, busy) == count


# -- settings ----------------------------------------------------------------------------------------------------


def test_an_engine_takes_one_bundle_with_all_its_shards() -> None:
    settings = RaySettings.parse({"shards": 2, "num_cpus": 3, "num_gpus": 1, "engine_options": {"max_num_seqs": 7}})
    assert settings.bundle == {"CPU": 6, "GPU": 2}
    assert settings.to_model().num_threads == 3 and settings.to_engine().max_num_seqs == 7
    assert RaySettings.parse({}).bundle == {"CPU": 1}


def test_fronts_are_told_only_what_concerns_them() -> None:
    one = RaySettings.parse({"max_requests": 7, "model_options": {"revision": "x", "quantization": "int8"}})
    other = RaySettings.parse({"max_requests": 7, "model_options": {"revision": "x"}, "min_engines": 1, "shards": 2})
    assert one.for_fronts() == other.for_fronts()
    assert one.for_fronts().max_requests == 7 and one.for_fronts().to_model().revision == "x"


def test_controllers_run_where_all_machines_share_their_store() -> None:
    assert RaySettings.parse({}).to_control().mode == "off"
    shared = RaySettings.parse({"control_store": "/shared/controllers", "min_engines": 2, "max_engines": 2})
    control = shared.to_control()
    assert control.mode == "on" and control.store == Path("/shared/controllers") and not control.prepare
    assert shared.for_fronts().to_control() == control
    told = ReplicaConfig(shared.to_model(), shared.to_engine(), control=control)
    assert ReplicaConfig.decode(told.encode()).control == control


def test_no_adapter_can_be_added_to_a_cluster_later() -> None:
    home = IngressLoRAStore()
    files: Any = None
    home.check(files)
    home.seal()
    with pytest.raises(UnsupportedFeature, match="set only when it is deployed"):
        home.check(files)
    assert home.fetch("x").done() and home.status("x").state == "host"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"modle": "x"}, "modle: Extra inputs"),
        ({"min_engines": 3, "max_engines": 2}, "max_engines is 2; must be at least min_engines, 3"),
        ({"initial_engines": 5}, "initial_engines is 5; must be from 1 to 1"),
        ({"model_options": {"colour": 1}}, "model_options has no field 'colour'"),
        ({"engine_options": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"shards": -1}, "shards: "),
    ],
)
def test_wrong_settings_are_refused(args: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        build_app(args)
