"""Checks with the real `cohere` client; the arguments are the addresses of a server for ranking and one for
embeddings."""

import sys

import cohere

ranks, embeds = sys.argv[1:3]
QUERY, TEXTS = "What do bears eat?", ["Bears eat honey", "Paris is in France", "Honey is sweet"]


def check_second_version() -> None:
    for url, model in ((ranks, "ranker"), (embeds, "embedder")):
        found = cohere.ClientV2(api_key="none", base_url=url).rerank(model=model, query=QUERY, documents=TEXTS)
        scores = [row.relevance_score for row in found.results]
        assert sorted(row.index for row in found.results) == [0, 1, 2], found
        assert scores == sorted(scores, reverse=True) and len(set(scores)) == 3, found


def check_best() -> None:
    client = cohere.ClientV2(api_key="none", base_url=ranks)
    whole = client.rerank(model="ranker", query=QUERY, documents=TEXTS)
    part = client.rerank(model="ranker", query=QUERY, documents=TEXTS, top_n=1)
    assert [row.index for row in part.results] == [whole.results[0].index]


def check_first_version() -> None:
    client = cohere.Client(api_key="none", base_url=ranks)
    found = client.rerank(model="ranker", query=QUERY, documents=TEXTS, return_documents=True, top_n=2)
    assert [row.document.text for row in found.results] == [TEXTS[row.index] for row in found.results]
    objects = client.rerank(model="ranker", query=QUERY, documents=[{"text": text} for text in TEXTS], top_n=2)
    assert [row.index for row in objects.results] == [row.index for row in found.results]


def check_errors() -> None:
    client = cohere.ClientV2(api_key="none", base_url=ranks)
    for given, told in (
        ({"model": "nobody", "documents": TEXTS}, "nobody"),
        ({"model": "ranker", "documents": []}, "documents"),
    ):
        try:
            client.rerank(query=QUERY, **given)
        except (cohere.BadRequestError, cohere.NotFoundError, cohere.UnprocessableEntityError) as error:
            assert told in str(error), error
        else:
            raise AssertionError(f"{given} was answered")


for check in (check_second_version, check_best, check_first_version, check_errors):
    check()
    print(check.__name__, "ok", flush=True)
