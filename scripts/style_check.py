"""Check the words of pages, docstrings, help texts and messages against the style sheet in CONTRIBUTING.md.

    python scripts/style_check.py

Errors are banned phrases, sentences over 30 words, and too many docstrings that start with a question word. Standard
library only.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 30
MAX_QUESTIONS = 100

#: Each banned phrase, a regular expression over lower-case text, with the advice for its place.
BANNED = {
    r"(that|which) (is|are) none": "say what it is or is missing",
    r"so many": "give the number or its name",
    r"of late(?! \w+s\b)": "recently, recent",
    r"held? to": "limited to, compared to, must match",
    r"(tells?|told) of": "reports, names",
    r"tak(e|es|en|ing) up": "occupies, resumes",
    r"be it": "whether",
    r"goes by": "uses, follows",
    r"what is (told|asked|wanted)": "name it",
    r"(?<!soon )(?<!long )(?<!far )as it is(?! \w+(ed|en|wn)\b)": "unchanged, or leave it out",
    r"for good": "permanently",
    r"a name that is nobody's": "unknown name",
    r"whoever": "the user, client or operator that",
    r"gone on": "resumed, continued",
    r"(is|are|was|were|been) told(?! apart)": "gets, is reported, returned or logged",
}
#: Passages in which a phrase is right or a quotation: file, then a piece of the sentence.
ALLOWED = {
    ("CONTRIBUTING.md", "Ban:"),
    ("CONTRIBUTING.md", '"as it is", "for good"'),
    ("CONTRIBUTING.md", "resumed, not gone on"),
    ("CONTRIBUTING.md", "that, not whoever"),
}

#: Sources whose bytes are those of a built module, and files that are generated or a history.
EXCLUDED = ("dev/controllers/sources/", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "dev/log.md", "web/node_modules/")
GENERATED = ("_pb2.py",)

_BANNED = {re.compile(rf"\b{phrase}\b", re.IGNORECASE): advice for phrase, advice in BANNED.items()}
_ANY = re.compile("|".join(rf"\b{phrase}\b" for phrase in BANNED), re.IGNORECASE)
_QUESTION = re.compile(r"(What|Whether|Who|How|Where|Which)\b")
_LOWER = r"(?:bridle|llama|lm-eval|torch|transformers)\b"  # names that begin a sentence in lower case
_SENTENCE = re.compile(
    rf"(?:(?<=[.!?:])|(?<=[.!?]\)))\s+(?=[A-Z`*\"'(\[0-9-])|(?<=[.!?])\s+(?={_LOWER})|\n\s*\n|\n\s*[*-] |\|"
)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`|\(https?://\S+\)")
_SOURCES = r"(?: \([\w ,.&-]*\))?"  # after a name: the systems that have it
_NAMES = re.compile(rf"X{_SOURCES}(?:,? (?:(?:and|or) )?X\b{_SOURCES})+")  # a list of names, which reads as one
_INDENTED = re.compile(r"\n\n(?: {4}.*(?:\n|$)|\n)+")  # code and doctests in a docstring
_PARAMETER = re.compile(r"^\S.*\n(?= {4,}\S)", re.MULTILINE)  # a name of numpydoc, above its description
_SUITE = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Passage(NamedTuple):
    """One text: a page, a docstring, or a message. `is_docstring` marks those that open a module, class or function."""

    file: str
    line: int
    text: str
    is_docstring: bool = False


def docstrings_of(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstring of each module, class and function."""
    for node in ast.walk(tree):
        if isinstance(node, _SUITE) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def source_passages(file: str, source: str) -> Iterator[Passage]:
    """Yield the docstrings of a Python file; for files of the package also the messages, which are strings that contain
    a space."""
    tree = ast.parse(source)
    docs = {id(text): text for text in docstrings_of(tree)}
    for text in docs.values():
        yield Passage(file, text.lineno, str(text.value), is_docstring=True)
    if not file.startswith("bridle/"):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docs:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield Passage(file, node.lineno, node.value)


def page_passage(file: str, text: str) -> Passage:
    """Return a page without its code blocks; the lines keep their numbers."""
    without_blocks = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    return Passage(file, 1, _NAMES.sub("X", _CODE.sub("X", without_blocks)))


def passages(root: Path, files: Sequence[str]) -> Iterator[Passage]:
    """Yield all passages of those `files` that the check covers."""
    for file in files:
        if file.startswith(EXCLUDED) or file.endswith(GENERATED):
            continue
        if file.endswith(".py"):
            yield from source_passages(file, (root / file).read_text(encoding="utf-8"))
        elif file.endswith(".md"):
            yield page_passage(file, (root / file).read_text(encoding="utf-8"))


def banned(passage: Passage) -> Iterator[str]:
    """Yield an error for each banned phrase, with its file and line, and advice."""
    if not _ANY.search(passage.text):
        return
    for pattern, advice in _BANNED.items():
        for found in pattern.finditer(passage.text):
            start, end = passage.text.rfind("\n", 0, found.start()) + 1, passage.text.find("\n", found.end())
            line = passage.text[start : end if end >= 0 else None].strip()
            if not any(file == passage.file and piece in line for file, piece in ALLOWED):
                number = passage.line + passage.text.count("\n", 0, found.start())
                yield f"{passage.file}:{number}: {found[0]!r} ({advice}): {line[:100]}"


def prose_of(docstring: str) -> str:
    """Return a docstring without code blocks and doctests, with each described parameter as its own paragraph."""
    return _PARAMETER.sub("\n\n", _INDENTED.sub("\n\n", inspect.cleandoc(docstring)))


def long_sentences(passage: Passage) -> Iterator[str]:
    """Yield an error for each sentence over `MAX_WORDS` words, with the line on which its passage begins."""
    for sentence in _SENTENCE.split(prose_of(passage.text) if passage.is_docstring else passage.text):
        if len(words := sentence.split()) > MAX_WORDS:
            yield f"{passage.file}:{passage.line}: {len(words)} words, at most {MAX_WORDS}: {' '.join(words)}"


def check(root: Path, files: Sequence[str]) -> list[str]:
    """Return the errors of the files."""
    errors: list[str] = []
    questions: list[str] = []
    for passage in passages(root, files):
        errors += banned(passage)
        if passage.is_docstring or passage.file.endswith(".md"):
            errors += long_sentences(passage)
        if passage.is_docstring and _QUESTION.match(passage.text.strip()):
            questions.append(f"{passage.file}:{passage.line}: docstring starts with a question word")
    if len(questions) > MAX_QUESTIONS:
        errors += questions
    return errors


def main() -> int:
    """Print the errors; return the exit status."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    errors = check(ROOT, [file for file in listed if (ROOT / file).is_file()])
    print("\n".join([*errors, f"{len(errors)} errors"]))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
