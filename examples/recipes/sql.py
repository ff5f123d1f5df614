"""An SQL query that runs: a tool executes it on the database, and after an error the text is rolled back to the error.

    bridle serve demo --tools examples/recipes/tools.toml
    bridle run examples/recipes/sql.py

A name or a quoted value that the database does not contain is rolled back, and so is everything after it. The model
then chooses among the existing names or values. After any other error, the text is rolled back to the word that the
error message names, and that word is not allowed there again.
"""

import json
import re

import pyaici.server as aici

DATABASE = "shop"
QUESTION = "How many products are there?"
MAX_REWINDS = 5


async def ask(query: str) -> dict[str, list[list[object]] | str]:
    """Return the rows of a query, or the error of the database."""
    return await aici.tool("sql", {"database": DATABASE, "query": query}).json()


async def values_of(tables: list[str]) -> list[str]:
    """Return all texts that the database contains."""
    places = [(re.search(r"TABLE (\w+)", each)[1], name) for each in tables for name in re.findall(r"(\w+) TEXT", each)]
    result = await ask(" UNION ".join(f"SELECT {column} FROM {table}" for table, column in places))
    return [row[0] for row in result["rows"]]


async def mend(query: str, error: str, names: list[str], values: list[str], begin: aici.Label) -> str:
    """Roll the text back to the error, and generate another word there. Return the query up to the end of that word."""
    found = re.search(r"no such \w+: (?:\w+\.)?(.+)", error) or re.search(r'near "(.+?)"', error)
    wrong = found[1] if found else ""
    place = re.search(rf"(?<!\w){re.escape(wrong)}(?!\w)", query[7:])
    kept = query[: 7 + place.start() if wrong and place else 7].removesuffix(" ")
    space = " " if query[len(kept) :].startswith(" ") else ""
    await aici.FixedTokens(kept, following=begin)
    if error.startswith("no such"):
        others = [f"{each}'" for each in values] if "value" in error else [each for each in names if each != wrong]
        return kept + await aici.choose([space + each for each in others])
    bias = dict.fromkeys(aici.tokenize(space + wrong)[:1], -100)
    return kept + await aici.gen_text(max_tokens=1, bias=bias)


async def completed(query: str) -> str:
    """Return the query after generating the rest, up to its semicolon."""
    return query + await aici.gen_text(stop_at=";", max_tokens=80)


async def main() -> None:
    tables = [row[0] for row in (await ask("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"))["rows"]]
    names = sorted({name for table in tables for name in re.findall(r"(?:TABLE|[(,])\s*(\w+)", table)})
    values = await values_of(tables)
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        await aici.chat("\n".join([*tables, "", QUESTION, "Answer with one query in SQLite."]))
    begin, query = aici.Label(), "SELECT"
    await aici.FixedTokens(query)
    query = await completed(query)
    for _ in range(MAX_REWINDS):
        unknown = [each for each in re.findall(r"'([^']*)'", query) if each not in values]
        result = {"error": f"no such value: {unknown[0]}"} if unknown else await ask(query)
        if "rows" in result:
            aici.set_var("rows", json.dumps(result["rows"]))
            break
        print(f"rewound: {result['error']} in {query}")
        query = await completed(await mend(query, result["error"], names, values, begin))


aici.start(main())
