"""Print sentences of the project at random, to judge whether they are clear at first reading.

    python -m dev.sample_sentences [--seed 1] [--count 60]

Each kind of text has the same share of the sample: pages, docstrings, help texts, messages of errors and logs, and
commit messages. The same seed and commit give the same sentences.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.style_check import EXCLUDED, ROOT, docstrings_of, prose_of

_COMMITS = 500
_LOGGED = {"debug", "info", "warning", "error", "exception", "critical"}
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])|\n\s*\n|\n\s*(?:[*-]|\d+\.) |\n(?=#)|\|")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LEAST_WORDS = 4


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a text that have at least four words, each on one line. Blocks of code are skipped."""
    for part in _SENTENCE.split(_FENCE.sub("", text)):
        sentence = " ".join(part.split()).strip("#>* ")
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= _LEAST_WORDS:
            yield sentence


def text_of(node: ast.expr) -> str | None:
    """Return the text of a string literal, with `...` for values in it; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return None


def messages_of(tree: ast.AST) -> Iterator[str]:
    """Yield the first text argument of each raised error and of each log call."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        is_log = isinstance(call.func, ast.Attribute) and call.func.attr in _LOGGED
        if (isinstance(node, ast.Raise) or is_log) and (texts := list(filter(None, map(text_of, call.args)))):
            yield texts[0]


def help_of(tree: ast.AST) -> Iterator[str]:
    """Yield the help texts, which are the strings below the fields of option classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    yield text_of(below.value) or ""


def git(*arguments: str) -> str:
    """Return the output of a git command in the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S603, S607


def commits() -> list[str]:
    """Return the sentences of the newest commit messages."""
    return list(sentences_of(git("log", "--format=%s%n%n%b", f"--max-count={_COMMITS}")))


def texts() -> dict[str, list[str]]:
    """Return all sentences by kind, each after the path of its file."""
    kinds: dict[str, list[str]] = {"page": [], "docstring": [], "help": [], "message": [], "commit": []}
    for file in git("ls-files", "*.py", "*.md").splitlines():
        if file.startswith(EXCLUDED) or file.endswith("_pb2.py") or not Path(ROOT, file).is_file():
            continue
        source = Path(ROOT, file).read_text(encoding="utf-8")
        found: dict[str, list[str]] = {}
        if file.endswith(".md"):
            found["page"] = [source]
        else:
            tree = ast.parse(source)
            found["docstring"] = [prose_of(str(node.value)) for node in docstrings_of(tree)]
            if file.startswith("bridle/"):
                found |= {"message": list(messages_of(tree)), "help": list(help_of(tree))}
        for kind, passages in found.items():
            split = (lambda text: [" ".join(text.split())]) if kind == "help" else sentences_of
            kinds[kind] += [f"{file}: {each}" for passage in passages for each in split(passage)]
    kinds["commit"] = commits()
    return {kind: list(dict.fromkeys(found)) for kind, found in kinds.items()}


def sample(kinds: dict[str, list[str]], seed: int, count: int) -> list[str]:
    """Return `count` sentences, the same number of each kind as far as there are enough."""
    chooser = random.Random(seed)
    share = -(-count // len(kinds))
    chosen = [
        f"[{kind}] {each}" for kind, found in kinds.items() for each in chooser.sample(found, min(share, len(found)))
    ]
    return chosen[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sampled sentences with their numbers."""
    parser = argparse.ArgumentParser(description="Print sentences of the project at random.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    given = parser.parse_args(arguments)
    for number, sentence in enumerate(sample(texts(), given.seed, given.count), 1):
        print(f"{number:2} {sentence}")


if __name__ == "__main__":
    main()
