"""Flags that put models into other processes, and those that contradict each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bridle.cli.serve import ShardOptions
from bridle.errors import InvalidRequest
from bridle.http.settings import ServeSettings
from bridle.launch.launcher import launch_shard
from bridle.launch.replicas import ReplicaLoader
from bridle.serving.models.served_models import EngineLoader


def loader_of(**options: Any) -> Any:
    return ShardOptions(**options).add_to(ServeSettings()).make_loader


def test_models_stay_here_unless_told_otherwise() -> None:
    assert loader_of() is EngineLoader


@pytest.mark.parametrize(
    ("options", "shards", "stands_by"),
    [
        ({"isolate_model": True}, 1, True),
        ({"shards": 1, "spare": False}, 1, False),
        ({"shards": 2, "isolate_model": True}, 2, True),
    ],
)
def test_a_shard_is_launched(options: dict[str, Any], shards: int, stands_by: bool) -> None:
    make = loader_of(**options)
    assert isinstance(make, partial)
    launch = make.keywords["executors"]
    assert (launch.func, launch.keywords) == (launch_shard, {"shards": shards, "stands_by": stands_by})


def test_replicas_may_have_shards() -> None:
    make = loader_of(replicas=3, shards=2)
    assert (make.func, make.args) == (ReplicaLoader, (3, 2))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shard": "localhost:1", "isolate_model": True}, "shard cannot be combined with"),
        ({"shard": "localhost:1", "replicas": 2}, "shard cannot be combined with"),
        ({"shard": "nowhere"}, "must be unix:"),
        ({"replicas": 0}, "replicas is 0"),
        ({"shards": -1}, "shards is -1"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        loader_of(**options)
