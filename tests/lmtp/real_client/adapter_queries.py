"""Queries for the real LMQL that choose adapters. LMQL's interpreter runs them: `python adapter_queries.py ENDPOINT
TOKENIZER CERTIFICATE NAME...`. Each NAME is a model or an adapter.

Prints one line of JSON. Imports no module of bridle.
"""

import asyncio
import json
import pathlib
import sys

import lmql

ENDPOINT, TOKENIZER, CERTIFICATE, *NAMES = sys.argv[1:]
STORY = 'argmax "Once upon a time[X]" where len(TOKENS(X)) < 12'


def model(name, **options):
    return lmql.model(name, endpoint=ENDPOINT, tokenizer=TOKENIZER, **options)


@lmql.query(model=model("pirate"))
async def as_pirate(start):
    """lmql
    "{start}[X]" where len(TOKENS(X)) < 12
    return X
    """


@lmql.query(model=model("demo"))
async def both(start):
    """lmql
    "{start}[X]" where len(TOKENS(X)) < 12
    other = as_pirate(start)
    return [X, other]
    """


async def story(name, **options):
    return (await lmql.run(STORY, model=model(name), **options))[0].variables["X"]


async def told(name):
    """Return a model's answer, or its error."""
    try:
        return await story(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def scores(name):
    result = await model(name).score("It is", [" good", " bad"])
    return [float(value) for value in result.logprobs()]


def read_certificate():
    return json.loads(pathlib.Path(CERTIFICATE).read_text())


async def main() -> None:
    stories = await asyncio.gather(*(told(name) for name in NAMES))
    await story("pirate", certificate=CERTIFICATE)
    results = {
        "stories": dict(zip(NAMES, stories, strict=True)),
        "both": await both("Once upon a time"),
        "option": (await lmql.run(STORY, model=model("demo", adapter="pirate")))[0].variables["X"],
        "scores": {name: await scores(name) for name in ("demo", "pirate")},
        "certificate": read_certificate(),
    }
    print(json.dumps(results))


asyncio.run(main())
