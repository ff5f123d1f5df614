"""Sends the cases of BFCL to a server, and prints how many answers are right.

    pip install --no-deps --target /tmp/bfcl bfcl-eval
    python -m dev.bfcl.run ask http://127.0.0.1:8080/v1 bridle results.jsonl --package /tmp/bfcl --cases 100
    python -m dev.bfcl.run table results.jsonl --package /tmp/bfcl

Results are stored as lines of JSON; cases with a stored result are not sent again. There are three modes.
`unconstrained` uses a controller without rules, so that no grammar applies (only bridle supports this). `non-strict`
and `strict` differ in the field `function.strict`.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from math import sqrt
from pathlib import Path
from typing import Any

from bridle.chat.stream_deltas import CallRules, ParsedMessage
from bridle.chat.tool_parsers.formats import HERMES, InferredFormat
from dev.bfcl.cases import CATEGORIES, Case, cases_of, is_right

MODES = ("unconstrained", "non-strict", "strict")
_FREE = {"controller": "declctrl", "controller_arg": {"steps": [{"Gen": {}}]}}
_SECONDS = 1800
_lock = threading.Lock()


def ask(given: argparse.Namespace) -> None:
    """Send the cases that have no stored result yet."""
    known = {_key(each) for each in _records(given.results)}
    columns = [cases_of(given.package, category, given.cases) for category in given.categories]
    with given.results.open("a") as file, ThreadPoolExecutor(given.concurrent) as pool:

        def one(case: Case) -> None:
            """Ask one case in all modes, one after another: later modes find the prompt in the server's prefix
            cache."""
            for mode in given.modes:
                if (given.server, mode, case.id) not in known:
                    record = {"server": given.server, **_ask_one(given, mode, case)}
                    with _lock:
                        print(json.dumps(record), file=file, flush=True)

        # Categories take turns, so that an interrupted run has the same number of cases of each.
        list(pool.map(one, (case for row in zip_longest(*columns) for case in row if case is not None)))


def _ask_one(given: argparse.Namespace, mode: str, case: Case) -> dict[str, Any]:
    body = {
        "model": given.model,
        "messages": case.messages,
        "tools": case.tools(mode == "strict"),
        "temperature": 0,
        "max_tokens": given.max_tokens,
        **(_FREE if mode == "unconstrained" else {}),
    }
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{given.url}/chat/completions", json.dumps(body).encode(), head)  # noqa: S310
    record: dict[str, Any] = {"mode": mode, "category": case.category, "id": case.id, "began": time.time()}
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310  (the operator's own server)
            record |= _read(json.load(answer))
    except urllib.error.HTTPError as error:
        record["error"] = f"{error.code}: {error.read(2000).decode(errors='replace')}"
    return record | {"ended": time.time()}


def _read(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    usage = answer["usage"]
    return {
        "calls": [{"name": each["name"], "arguments": each["arguments"]} for each in calls],
        "content": message.get("content"),
        "finish": choice["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "tokens": usage["completion_tokens"],
    }


def table(given: argparse.Namespace) -> None:
    """Print a row of the table for each server and mode."""
    records = [each for file in given.results for each in _records(file)]
    if given.common:
        asked = Counter(each["id"] for each in records)
        num_rows = len({(each["server"], each["mode"]) for each in records})
        records = [each for each in records if asked[each["id"]] == num_rows]
    print("| Server | Mode | " + " | ".join(CATEGORIES) + " | Tokens |")
    print("| --- | --- |" + " ---: |" * (len(CATEGORIES) + 1))
    known = {case.id: case for name in CATEGORIES for case in cases_of(given.package, name, 1 << 20)}
    for server, mode in dict.fromkeys((each["server"], each["mode"]) for each in records):
        rows = [each for each in records if (each["server"], each["mode"]) == (server, mode)]
        cells = [_accuracy(given, [e for e in rows if e["category"] == name], known) for name in CATEGORIES]
        tokens = sum(each.get("tokens", 0) for each in rows)
        print(f"| {server} | {mode} | {' | '.join(cells)} | {tokens:,} |")


def _accuracy(given: argparse.Namespace, rows: Sequence[dict[str, Any]], known: dict[str, Case]) -> str:
    right = sum("error" not in e and is_right(given.package, known[e["id"]], _calls(given, e, known)) for e in rows)
    failed = sum("error" in each for each in rows)
    low, high = _interval(right, len(rows))
    return f"{right} of {len(rows)} ({low:.0%} to {high:.0%})" + (f", {failed} refused" if failed else "")


def _calls(given: argparse.Namespace, row: dict[str, Any], known: dict[str, Case]) -> list[dict[str, str]]:
    """Return the calls that the server found in its model's answer. With `--read-content`, bridle's parser also reads
    calls from the text of the answer."""
    if row["calls"] or not given.read_content:
        return list(row["calls"])
    names = frozenset(tool["function"]["name"] for tool in known[row["id"]].tools(is_strict=False))
    reader = InferredFormat(HERMES, {}).reader(rules=CallRules(names))
    found = ParsedMessage().add(reader.push(row["content"] or "", is_last=True))
    return [{"name": call.name, "arguments": call.arguments} for call in found.calls]


def _interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for a share."""
    if not total:
        return 0.0, 1.0
    z, share = 1.96, right / total
    middle, spread = share + z * z / (2 * total), z * sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    low, high = ((middle + side) / (1 + z * z / total) for side in (-spread, spread))
    return max(low, 0.0), min(high, 1.0)


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _key(record: dict[str, Any]) -> tuple[str, str, str]:
    return record["server"], record["mode"], record["id"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("ask", help="ask a server")
    asking.add_argument("url", help="such as http://127.0.0.1:8080/v1")
    asking.add_argument("server", help="name of the server and its model in the table")
    asking.add_argument("results", type=Path, help="file of results, appended to")
    asking.add_argument("--model", default="coder")
    asking.add_argument("--cases", type=int, default=100, help="cases of each category. Default: 100")
    asking.add_argument("--categories", nargs="+", choices=CATEGORIES, default=CATEGORIES)
    asking.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    asking.add_argument("--concurrent", type=int, default=8)
    asking.add_argument("--max-tokens", type=int, default=256)
    asking.set_defaults(do=ask)
    showing = commands.add_parser("table", help="print what files of results show")
    showing.add_argument("results", type=Path, nargs="+")
    showing.add_argument("--common", action="store_true", help="count only the cases that every row has")
    showing.add_argument("--read-content", action="store_true", help="read calls in what a server returned as text")
    showing.set_defaults(do=table)
    for command in (asking, showing):
        command.add_argument("--package", type=Path, required=True, help="folder that contains bfcl_eval")
    given = parser.parse_args()
    given.do(given)


if __name__ == "__main__":
    main()
