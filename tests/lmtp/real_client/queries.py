"""Queries for the real LMQL. LMQL's interpreter runs them: `python queries.py ENDPOINT MODEL TOKENIZER CERTIFICATE
[NAME...]`. An empty endpoint means LMQL's default.

Prints one line of JSON with the result or `error` of each query. Imports no module of bridle.
"""

import asyncio
import json
import pathlib
import sys
import traceback

import lmql

ENDPOINT, MODEL, TOKENIZER, CERTIFICATE, *ONLY = sys.argv[1:]


def read_certificate():
    return json.loads(pathlib.Path(CERTIFICATE).read_text())


def model(**options):
    return lmql.model(MODEL, endpoint=ENDPOINT or None, tokenizer=TOKENIZER, **options)


async def stops_at():
    code = 'argmax "Once upon a time[X]" where STOPS_AT(X, ".") and len(TOKENS(X)) < 40'
    return (await lmql.run(code, model=model()))[0].variables["X"]


async def token_limit():
    code = 'argmax "Once upon a time[X]" where len(TOKENS(X)) < 10'
    return (await lmql.run(code, model=model()))[0].variables["X"]


async def lower_limit():
    code = 'argmax "Once upon a time[X]" where 2 < len(TOKENS(X)) and len(TOKENS(X)) < 6'
    return (await lmql.run(code, model=model()))[0].variables["X"]


async def one_of():
    code = 'argmax "The weather today is[X]" where X in [" good", " bad", " terrible"]'
    return (await lmql.run(code, model=model()))[0].variables["X"]


async def integer():
    code = 'argmax "My age is[X]" where INT(X) and len(TOKENS(X)) < 5'
    return (await lmql.run(code, model=model()))[0].variables["X"]


async def excluded():
    code = 'argmax "Once upon a time[X]" where not "e" in X and len(TOKENS(X)) < 8'
    return (await lmql.run(code, model=model()))[0].variables["X"]


async def distribution():
    code = """"Review: A very nice place.[COMMENT]\\n" where len(TOKENS(COMMENT)) < 8
"It is[MOOD]" distribution MOOD in [" good", " bad"]
"""
    result = await lmql.run(code, model=model())
    return [[value, float(share)] for value, share in result.variables["P(MOOD)"]]


async def beam():
    code = 'beam(n=2) "One, two,[X]" where X in [" three", " four", " five"]'
    return [each.variables["X"] for each in await lmql.run(code, model=model())]


async def free_beam():
    code = 'beam(n=2) "Once upon a time[X]" where len(TOKENS(X)) < 5'
    return [each.variables["X"] for each in await lmql.run(code, model=model())]


async def sampled():
    code = 'sample(n=2, temperature=1.2) "Once upon a time[X]" where len(TOKENS(X)) < 8'
    return [each.variables["X"] for each in await lmql.run(code, model=model(top_p=0.9, top_k=20))]


async def scripted():
    code = """argmax
    names = []
    for number in range(3):
        "Name {number}:[NAME]\\n" where STOPS_BEFORE(NAME, "\\n") and len(TOKENS(NAME)) < 8
        names.append(NAME)
    if len(names) == 3:
        "The last one is[LAST]" where LAST in [" a cat", " a dog"]
    return [names, LAST]
"""
    return await lmql.run(code, model=model())


async def no_prompt():
    code = 'argmax "[X]" where len(TOKENS(X)) < 4'
    return (await lmql.run(code, model=model()))[0].variables["X"]


async def parallel():
    code = 'argmax "{start}[X]" where len(TOKENS(X)) < 12'
    starts = ["Once", "There was", "One day", "A cat", "The sun", "She said", "He had", "They went"]
    runs = [lmql.run(code, model=model(), start=start) for start in starts]
    return [result[0].variables["X"] for result in await asyncio.gather(*runs)]


async def certificate():
    code = 'argmax "Hello[X]" where len(TOKENS(X)) < 4'
    await lmql.run(code, model=model(), certificate=CERTIFICATE)
    return read_certificate()


async def score():
    result = await model().score("It is", [" good", " bad"])
    return [float(value) for value in result.probs()]


QUERIES = (
    stops_at, token_limit, lower_limit, one_of, integer, excluded, distribution, beam, free_beam, sampled, scripted,
    no_prompt, parallel, certificate, score,
)  # fmt: skip


async def main() -> None:
    results = {}
    for query in QUERIES:
        if ONLY and query.__name__ not in ONLY:
            continue
        try:
            results[query.__name__] = await asyncio.wait_for(query(), 120)
        except Exception:
            results[query.__name__] = {"error": traceback.format_exc()[-2000:]}
    print(json.dumps(results))


asyncio.run(main())
