"""Tests that the README and pages are right: their commands, programs and requests run, and their links and file names
exist. Programs and requests use a server of the demo model in this process. A page whose programs run in another test
is listed with that test, so that none is forgotten."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridle import LLM
from bridle.cli.app import app
from bridle.cli.run import settings_file
from bridle.serving import ControlSettings
from tests.command_server import command_folder
from tests.covering import slow_but
from tests.http.controlled import lent
from tests.http.harness import served
from tests.pages import Block, blocks_of, log_elsewhere, path_without_this_python, run_commands, run_programs, shows
from tests.sources import DEFAULT_MODEL, ROOT, SERVED_AT

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
PAGES |= {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "dev/log.md")
}

#: Pages whose programs run elsewhere, and where.
ELSEWHERE = {
    "docs/constraints.md": "structured_output/test_llm.py",
    "docs/lmtp-client.md": "lmtp/test_client_page.py",
    "docs/lora.md": "test_lora_page.py",
    "docs/ollama.md": "real_clients/test_ollama_clients.py",
    "docs/pictures.md": "test_pictures.py",
    "docs/python-api.md": "test_python_api_page.py",
    "docs/scripts-python.md": "controllers/test_py_steps.py",
    "docs/sound-and-video.md": "test_sounds.py",
}
#: Pages whose programs start processes or take long.
SLOW = ("docs/shards.md", "docs/simulation.md")
#: Pages whose programs write files.
WRITING = ("docs/traces.md",)
#: Programs that do not end by themselves.
ENDLESS = ("serve_forever",)


def blocks(page: str, *languages: str) -> list[str]:
    """Return the code blocks of a page in the given languages."""
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", PAGES[page], re.DOTALL)


def at(page: str, server: str) -> list[Block]:
    """Return the blocks of a page, with the address of `server` and the demo model."""
    return blocks_of(PAGES[page].replace(SERVED_AT, server).replace(f'"{DEFAULT_MODEL}"', '"demo"'))


def prose(page: str) -> str:
    return re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)


HERE = [
    pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page
    for page in sorted(PAGES)
    if blocks(page, "python") and page not in ELSEWHERE
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo model with controllers, and yield the address. The pages' programs share its compiled modules."""
    patient = ("--limit", "max_prepare_wait=600000", "--wasm-max-step-time", "1000", "--wasm-max-init-time", "10000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # its client asks our server
        with LLM("demo", control=ControlSettings("on", args=patient)) as llm, served(lent(llm.model)) as url:
            yield url


@pytest.mark.few(13)
@pytest.mark.parametrize("page", HERE)
def test_programs_run(page: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run from top to bottom, because a program may use what an earlier one defined. The printed output must
    match the output on the page."""
    log_elsewhere()
    if page in WRITING:
        monkeypatch.chdir(tmp_path)
    printed = run_programs(at(page, server), page, {}, ENDLESS)
    assert printed.strip() or not any("print(" in program for program in blocks(page, "python"))


COMMANDS = sorted(
    page
    for page, text in PAGES.items()
    if page != "docs/writing-controllers.md"  # it has a test of its own
    and any(block.output is not None and block.language != "python" for block in blocks_of(text))
)
#: What is read first, one page that makes files, and those whose commands take no time.
QUICK = {"README.md", "docs/first-server.md", "docs/traces.md", "docs/batching.md", "docs/from-tgi.md"}
QUICK |= {"docs/multiple-models.md", "docs/watching.md"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("page", slow_but(QUICK, COMMANDS))
def test_commands_print_what_is_shown(page: str, server: str, tmp_path: Path) -> None:
    """Commands run in a shell, in a folder with the files of a checkout. For the server tutorial, all commands run, in
    a shell without an active environment. For other pages, only commands with an `output` block run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    found, path = at(page, server), path_without_this_python()
    if page == "docs/first-server.md":
        if not (Path(sys.prefix) / "bin" / "bridle").exists() or find_spec("pip") is None:
            pytest.skip("this Python is no environment that bridle is installed in")
        found = [block for block in found if not block.text.startswith("make serve")]  # the fixture is that server
        assert len([block for block in found if block.language == "sh"]) > 5
    else:
        found = [block for block in found if block.output is not None or block.file]
        path = os.pathsep.join([str(command_folder()), str(Path(sys.executable).parent), path])
    run_commands(found, tmp_path, path, server)


def test_shown_outputs_are_compared() -> None:
    assert set(COMMANDS) >= {"README.md", "docs/build-an-app.md", "docs/contribute.md", "docs/first-server.md"}
    assert set(COMMANDS) >= {"docs/declarative.md", "docs/scripts-javascript.md"}
    assert shows("a ... c\n...\nz\n", "a b c\nany\nlines\nz \n") and shows("...\nz\n", "z\n")
    assert not any(shows("a ... c\n", printed) for printed in ("a b d\n", "a b\nc\n", "a b c\nmore\n"))
    (block,) = blocks_of("Save this as `a.js`:\n\n```js\ncode\n```\n\n```output\nshown\n```\n")
    assert (block.text, block.output, block.file) == ("code\n", "shown\n", "a.js")
    with pytest.raises(AssertionError, match="the page shows"):
        block.check("something else\n")


def test_every_shown_output_belongs_to_a_block() -> None:
    for page, text in PAGES.items():
        assert text.count("```output\n") == [block.output is None for block in blocks_of(text)].count(False), page


def test_pages_with_programs_are_known() -> None:
    for page, test in ELSEWHERE.items():
        assert blocks(page, "python")
        assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8")


def requests() -> list[tuple[str, str]]:
    """Return the curl lines that send requests to the demo model, with their pages."""
    found = []
    for page in PAGES:
        text = "\n".join(blocks(page, "sh", "bash", "console")).replace("\\\n", " ")
        lines = re.findall(rf"^curl .*{re.escape(SERVED_AT)}.*", text, re.MULTILINE)
        found += [(page, line) for line in lines if not re.search(r"guest\.wasm|mine|french", line)]
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("page", "line"), requests())
def test_requests_are_answered(page: str, line: str, server: str) -> None:
    command = line.replace(SERVED_AT, server).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (page, done.stdout, done.stderr)
    if "text/event-stream" in done.stdout or "data: " in done.stdout:
        assert done.stdout.rstrip().endswith("data: [DONE]") and done.stdout.count("data: ") > 2
    elif "regex" in line:
        assert re.fullmatch(r"[0-9]{1,3}", json.loads(done.stdout)["choices"][0]["text"])
    elif "yesno" in line:
        assert json.loads(done.stdout)["choices"][0]["text"].strip() in ("Yes", "No")


def test_there_are_requests_of_each_kind() -> None:
    lines = "\n".join(line for page, line in requests() if page == "docs/first-server.md")
    assert all(word in lines for word in ('"stream": true', "regex", "yesno"))


def test_commands_exist() -> None:
    shown = "\n".join(block for page in PAGES for block in blocks(page, "sh", "bash", "console")).replace("\\\n", " ")
    for line in sorted(set(re.findall(r"^(?:\$ )?bridle (.+)", shown, re.MULTILINE))):
        words = shlex.split(re.split(r" (?:[<|>]|\|\|) ", line)[0], comments=True)
        if words[0] == "--config":
            words = words[2:]
        if words[0] != "runtime":  # reads its own
            app.parse_args(words, exit_on_error=False, print_error=False)
    for page in PAGES:
        for verb in re.findall(r"`bridle ([a-z][a-z-]+)", prose(page)):
            assert verb in app, (page, verb)


def test_the_settings_file_is_read(tmp_path: Path) -> None:
    (text,) = blocks("docs/deploying.md", "yaml")
    (tmp_path / "bridle.yaml").write_text(text)
    words = ["--config", str(tmp_path / "bridle.yaml"), "serve"]
    with settings_file(words):
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    assert bound.args == ("demo",) and bound.kwargs["server"].max_requests == 256


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", prose("README.md") + "\n".join(blocks("README.md", "sh"))))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"serve", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets - {"and"})


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(page)):
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), (page, target)
            assert not anchor or anchor in anchors(path), (page, target)


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_leads_to_every_page_and_the_readme_to_the_index() -> None:
    linked = {f"docs/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", PAGES["docs/README.md"])}
    assert linked == {page for page in PAGES if page.startswith("docs/")} - {"docs/README.md"}
    assert "](docs/README.md)" in PAGES["README.md"]


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120


def test_files_that_are_named_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:bridle|tests|examples|docs|deploy|scripts)/[\w./*-]+)`", prose(page)):
            assert [*ROOT.glob(name), *ROOT.joinpath("bridle").glob(name)], (page, name)


def test_names_in_the_table_of_additions_are_in_the_files_of_their_row() -> None:
    rows = [line for line in PAGES["CONTRIBUTING.md"].splitlines() if line.startswith("| a")]
    found = 0
    for row in rows:
        named = [path for place in re.findall(r"`(bridle/[^`]+)`", row) for path in ROOT.glob(place)]
        folders = {path if path.is_dir() else path.parent for path in named}
        source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
        for name in re.findall(r"`(_?[A-Z]\w+|_[a-z]\w+)`", row):
            assert re.search(rf"\b{name}\b", source), (name, row)
            found += 1
    assert found > 5


def test_every_package_has_its_line() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", PAGES["docs/structures.md"], re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/.]+)`", row)}
    there = {
        path.name for path in (ROOT / "bridle").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there - named == {"__init__.py", "__main__.py"}


def test_the_list_of_examples_is_complete() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w.]+)\)", text))
    assert named == {path.name for path in (ROOT / "examples").glob("*.*") if path.suffix in (".py", ".js", ".toml")}
