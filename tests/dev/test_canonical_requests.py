"""Tests of the texts in the benchmark of canonical masks."""

from __future__ import annotations

from dev.bench.canonical_requests import requests
from tests.structured_output.kit import matcher, text_vocabulary


def test_the_texts_fit_their_constraints() -> None:
    vocab = text_vocabulary()
    for name, cases in requests().items():
        assert len(cases) == 20
        walks = [(matcher(vocab, constraint), text) for constraint, text in cases]
        assert all(walk.take(text.encode()) and walk.is_accepting for walk, text in walks), name
