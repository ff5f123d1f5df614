"""Checks with the real `huggingface_hub` client; the arguments are the addresses of servers for embeddings, for
classification and for ranking."""

import math
import sys

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

embeds, sorts, ranks = sys.argv[1:4]


def client(url: str) -> InferenceClient:
    return InferenceClient(model=url, token="none")


def check_features() -> None:
    (vector,) = client(embeds).feature_extraction("Bears eat honey")
    assert vector.shape == (16,) and math.isclose(float((vector**2).sum()), 1.0, rel_tol=1e-4)
    (raw,) = client(embeds).feature_extraction("Bears eat honey", normalize=False)
    assert not math.isclose(float((raw**2).sum()), 1.0, rel_tol=1e-2)
    (named,) = client(embeds + "/embed").feature_extraction("Bears eat honey", prompt_name="query", truncate=True)
    assert named.shape == (16,) and abs(named - vector).max() > 1e-3


def check_similarity() -> None:
    scores = client(embeds).sentence_similarity("Honey", other_sentences=["Honey", "Paris is in France"])
    assert math.isclose(scores[0], 1.0, rel_tol=1e-4) and scores[1] < 1.0


def check_classification() -> None:
    found = client(sorts).text_classification("Honey")
    assert {row.label for row in found} == {"bad", "fair", "good"}
    assert math.isclose(sum(row.score for row in found), 1.0, rel_tol=1e-4)
    assert [row.score for row in found] == sorted((row.score for row in found), reverse=True)
    assert len(client(sorts).text_classification("Honey", top_k=1)) == 1


def check_errors() -> None:
    for ask in (client(sorts + "/embed").feature_extraction, client(embeds).text_classification):
        try:
            ask("Honey")
        except (HfHubHTTPError, AttributeError, TypeError, ValueError):  # a list of vectors is no list of labels
            continue
        raise AssertionError(f"{ask} was answered")
    (score,) = client(ranks).text_classification("Honey")
    assert score.label == "relevant" and 0 < score.score < 1


for check in (check_features, check_similarity, check_classification, check_errors):
    check()
    print(check.__name__, "ok", flush=True)
