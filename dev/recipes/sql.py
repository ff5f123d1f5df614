"""Cases of the recipe `sql`: questions about databases of customers, products and orders, whose names and rows differ
between cases."""

from __future__ import annotations

import re
from functools import cache
from random import Random
from typing import Any

from dev.recipes.recipe import Case, Recipe
from examples.recipes.database import answer

_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon")
_CITIES = ("Oslo", "Rome", "Lima", "Cairo")
_GOODS = ("lamp", "chair", "table", "clock", "vase", "shelf", "sofa", "rug")
#: Names that a table or a column may have: a model cannot know which one without reading the schema.
_WORDS: dict[str, tuple[str, ...]] = {
    "customers": ("customers", "clients", "buyers", "members"),
    "products": ("products", "goods", "articles", "items"),
    "orders": ("orders", "sales", "purchases", "bookings"),
    "name": ("name", "full_name", "label", "title"),
    "city": ("city", "town", "home_city", "place"),
    "age": ("age", "years", "age_years", "age_in_years"),
    "price": ("price", "unit_price", "cost", "price_eur"),
    "quantity": ("quantity", "amount", "qty", "pieces"),
    "year": ("year", "order_year", "in_year", "sold_in"),
}
_SYSTEM = "Answer with one query in SQLite that ends with a semicolon, and nothing else."


def database(key: str) -> tuple[dict[str, str], str]:
    """Return a case's table and column names, and the SQL script that makes its database."""
    random = Random(key)
    names = {word: random.choice(choices) for word, choices in _WORDS.items()}
    people = [(i, name, random.choice(_CITIES), random.randint(18, 70)) for i, name in enumerate(_NAMES, 1)]
    goods = [(i, name, random.randint(5, 300)) for i, name in enumerate(_GOODS, 1)]
    sold = [
        (
            i,
            random.randint(1, len(_NAMES)),
            random.randint(1, len(_GOODS)),
            random.randint(1, 9),
            random.randint(2019, 2024),
        )
        for i in range(1, 41)
    ]
    inserts = [
        f"INSERT INTO {names[table]} VALUES {row};"
        for table, rows in (("customers", people), ("products", goods), ("orders", sold))
        for row in rows
    ]
    return names, "\n".join([*_tables(names), *inserts])


def _tables(names: dict[str, str]) -> list[str]:
    n = names
    return [
        f"CREATE TABLE {n['customers']} (id INTEGER, {n['name']} TEXT, {n['city']} TEXT, {n['age']} INTEGER);",
        f"CREATE TABLE {n['products']} (id INTEGER, {n['name']} TEXT, {n['price']} INTEGER);",
        f"CREATE TABLE {n['orders']} (id INTEGER, customer_id INTEGER, product_id INTEGER, {n['quantity']} INTEGER, "
        f"{n['year']} INTEGER);",
    ]


def question(random: Random, n: dict[str, str]) -> tuple[str, str]:
    """Return a question, and an SQL query that answers it."""
    city, age, year, thing = (
        random.choice(_CITIES),
        random.randint(25, 60),
        random.randint(2019, 2024),
        random.choice(_GOODS),
    )
    c, p, o = n["customers"], n["products"], n["orders"]
    kinds = (
        (f"How many {c} live in {city}?", f"SELECT COUNT(*) FROM {c} WHERE {n['city']} = '{city}'"),
        (f"Which {c} are older than {age}? List their names.", f"SELECT {n['name']} FROM {c} WHERE {n['age']} > {age}"),
        (f"What is the average age of the {c}?", f"SELECT AVG({n['age']}) FROM {c}"),
        (f"What does the {thing} cost?", f"SELECT {n['price']} FROM {p} WHERE {n['name']} = '{thing}'"),
        (
            "What is the name of the most expensive of the " + p + "?",
            f"SELECT {n['name']} FROM {p} ORDER BY {n['price']} DESC LIMIT 1",
        ),
        (f"How many {o} were there in {year}?", f"SELECT COUNT(*) FROM {o} WHERE {n['year']} = {year}"),
        (
            f"How many pieces of the {thing} were sold in total?",
            f"SELECT SUM({n['quantity']}) FROM {o} JOIN {p} ON product_id = {p}.id WHERE {n['name']} = '{thing}'",
        ),
        (
            f"Who bought the {thing}? List each name once.",
            f"SELECT DISTINCT {c}.{n['name']} FROM {c} JOIN {o} ON customer_id = {c}.id "
            f"JOIN {p} ON product_id = {p}.id WHERE {p}.{n['name']} = '{thing}'",
        ),
        (f"How many {o} are there for each year?", f"SELECT {n['year']}, COUNT(*) FROM {o} GROUP BY {n['year']}"),
    )
    return random.choice(kinds)


def form(names: dict[str, str]) -> dict[str, str]:
    """Return a grammar of queries that contain only the names of the database."""
    tables = " | ".join(f'"{names[each]}"' for each in ("customers", "products", "orders"))
    rest = [names[each] for each in ("name", "city", "age", "price", "quantity", "year")]
    columns = " | ".join(f'"{each}"' for each in dict.fromkeys(["id", "customer_id", "product_id", *rest]))
    return {
        "gbnf": 'root ::= "SELECT " "DISTINCT "? item (", " item)* " FROM " table rest ";"?\n'
        "rest ::= join* where? group? order? limit?\n"
        'item ::= "*" | column | call\n'
        'call ::= ("COUNT" | "SUM" | "AVG" | "MAX" | "MIN") "(" ("*" | column) ")"\n'
        'join ::= " JOIN " table " ON " column " = " column\n'
        'where ::= " WHERE " test ((" AND " | " OR ") test)*\n'
        'test ::= column (" = " | " > " | " < " | " >= " | " <= ") (value | column)\n'
        'value ::= [0-9]+ | "\'" [A-Za-z ]+ "\'"\n'
        'group ::= " GROUP BY " column\norder ::= " ORDER BY " (column | call) (" ASC" | " DESC")?\n'
        'limit ::= " LIMIT " [0-9]+\ncolumn ::= (table ".")? name\n'
        f"table ::= {tables}\nname ::= {columns}\n"
    }


def cases(count: int, seed: int) -> list[Case]:
    """Return `count` cases, each with its own seed and database."""
    return [_case(f"{seed}-{number}") for number in range(count)]


def _case(key: str) -> Case:
    names, _ = database(key)
    asked, query = question(Random(f"{key} question"), names)
    text = "\n".join([*_tables(names), "", asked])
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
    return Case(key, messages, query, form(names), {"DATABASE": key})


def is_right(case: Case, text: str) -> bool:
    """Return whether the text's query gives the same rows as the right query, in any order."""
    found = re.search(r"\bSELECT\b[^;`]*", text, re.IGNORECASE)
    return found is not None and _rows(case.id, found[0]) == _rows(case.id, case.known)


def _rows(key: str, query: str) -> list[str] | str:
    result = run(key, query)
    return sorted(map(str, result["rows"])) if "rows" in result else result["error"]


@cache
def _script(key: str) -> str:
    return database(key)[1]


def run(database: str, query: str) -> dict[str, Any]:
    """The recipe's tool `sql`, which runs a query on a case's database."""
    return answer(_script(database), query)


RECIPE = Recipe("sql.py", 90, cases, is_right, tools={"sql": run})
