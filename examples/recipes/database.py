"""The tool of the recipe `sql.py`: queries of a small shop's database. Queries may only read, for at most a second, and
return at most a hundred rows."""

import sqlite3
import time
from contextlib import closing
from typing import Any

SHOP = """
CREATE TABLE products (id INTEGER, name TEXT, price REAL);
CREATE TABLE orders (id INTEGER, product_id INTEGER, quantity INTEGER);
INSERT INTO products VALUES (1, 'lamp', 25), (2, 'chair', 80), (3, 'table', 240);
INSERT INTO orders VALUES (1, 1, 4), (2, 3, 1), (3, 1, 2);
"""
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_SECONDS, _ROWS = 1.0, 100


def run(database: str, query: str) -> dict[str, Any]:
    """Return the first rows of a query, or its error."""
    script = {"shop": SHOP}.get(database)
    return {"error": f"no such database: {database}"} if script is None else answer(script, query)


def answer(script: str, query: str) -> dict[str, Any]:
    """Return the first rows of a query to the database that an SQL script makes, or the query's error."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        deadline = time.monotonic() + _SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
        try:
            return {"rows": connection.execute(query).fetchmany(_ROWS)}
        except (sqlite3.Error, sqlite3.Warning) as error:
            return {"error": str(error)}
