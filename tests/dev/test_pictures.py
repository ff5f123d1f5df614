"""Tests that the documentation's images show recorded runs, with every kind of token that their legend names."""

from __future__ import annotations

from xml.etree import ElementTree

from PIL import Image

from bridle import LLM
from dev.pictures.playground import MAX_RECORDING, RECORDING
from dev.pictures.steered_stream import COLORS, draw, record
from tests.sources import ROOT


def test_the_legend_of_the_stored_image_is_that_of_the_script() -> None:
    stored = (ROOT / "docs" / "pictures" / "steered.svg").read_text()
    assert all(f">{words}</text>" in stored for _, words in COLORS.values()) and "rolled back" in stored


def test_the_steered_stream_shows_every_kind_of_token() -> None:
    with LLM("demo", num_blocks=256) as llm:
        lanes = record(llm)
    assert len(lanes) == 2 and lanes[1].parent == 0
    assert {token.kind for lane in lanes for token in lane.tokens} == set(COLORS)
    texts = ["".join(token.text for token in lane.tokens if token.kind not in ("prompt", "rewound")) for lane in lanes]
    assert all(text.startswith('{"name": "') and text.endswith('"}') for text in texts)
    root = ElementTree.fromstring(draw(lanes))
    shown = ["".join(each.itertext()) for each in root.iter() if "token" in each.get("class", "")]
    assert len(shown) == sum(len(lane.tokens) for lane in lanes)


def test_the_recording_of_the_playground_is_small_and_shown() -> None:
    path = ROOT / "docs/pictures" / RECORDING
    assert path.stat().st_size <= MAX_RECORDING
    with Image.open(path) as recording:
        assert recording.is_animated and recording.n_frames > 20
    assert f"docs/pictures/{RECORDING}" in (ROOT / "README.md").read_text()
    assert f"pictures/{RECORDING}" in (ROOT / "docs/playground.md").read_text()
