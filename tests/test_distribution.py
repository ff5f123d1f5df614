"""Tests of the distribution's name, version and address: each is defined once, and every copy agrees with it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import bridle
from bridle.cli import setup_probes
from bridle.distribution import NAME, install_hint
from tests.sources import ROOT

#: `bridle[ray]` or `pip install bridle`, which is another project.
_LEFT_OVER = re.compile(r"""['"`]bridle(==|\\?\[)|pip3? install (?:[^\n#]*['" ])?bridle(?:['" =\[]|$)""", re.MULTILINE)
#: Files with a copy of the version, and where it is in them.
_VERSIONS = {
    "CITATION.cff": r"^version: (\S+)$",
    "deploy/helm/bridle/Chart.yaml": r'^(?:v|appV)ersion: "?([^"\s]+)"?$',
    "deploy/kubernetes/bridle.yaml": r'app.kubernetes.io/version: "(.*)"|bridle:([^"]+)"$',
    "docs/deploying.md": r"localhost/bridle:([\d.]+)",
}


@cache
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def files() -> list[Path]:
    """Return every text file of the checkout that a release has, except this file and the files of the web pages."""
    folders = ("bridle", "dev", "docs", "deploy", "examples", "scripts", "tests", ".github")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = [*inside, *(path for path in ROOT.iterdir() if path.is_file())]
    binary = {".pyc", ".xz", ".so", ".png", ".safetensors", ".wasm"}
    return [path for path in found if path.suffix not in binary and path != Path(__file__).resolve()]


def matches(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """Return the matches of the pattern, by file. Files without a match are left out."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in files()}
    found = {name: [match.group() for match in pattern.finditer(text)] for name, text in texts.items()}
    return {name: texts for name, texts in found.items() if texts}


def test_code_and_project_file_agree_on_the_name() -> None:
    assert project()["name"] == NAME
    assert install_hint("aici", "cluster") == f"pip install '{NAME}[aici,cluster]'"


@pytest.mark.parametrize("text", ["pip install 'bridle[ray]'", '"bridle[aici]"', "pip install bridle\n", "'bridle\\[x"])
def test_other_name_is_recognized(text: str) -> None:
    assert _LEFT_OVER.search(text)


def test_nothing_installs_the_other_project() -> None:
    assert matches(_LEFT_OVER) == {}


def test_extras_that_are_named_exist() -> None:
    named = re.compile(re.escape(NAME) + r"\[([a-z,]+)\]")
    extras = {
        extra for texts in matches(named).values() for text in texts for extra in text[len(NAME) + 1 : -1].split(",")
    }
    assert extras and extras <= {*project()["optional-dependencies"]}


@pytest.mark.parametrize("file", _VERSIONS)
def test_copies_of_the_version_agree(file: str) -> None:
    found = re.findall(_VERSIONS[file], (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    copies = {"".join(each) for each in found}
    assert copies == {bridle.__version__}


def test_changelog_has_the_version() -> None:
    assert f"[{bridle.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_installed_metadata_agree() -> None:
    try:
        assert metadata.version(NAME) == bridle.__version__
    except metadata.PackageNotFoundError:
        pytest.skip(f"{NAME} is not installed here; its sources are on the path")


def test_doctor_needs_no_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        assert name == NAME
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(setup_probes.metadata, "requires", absent)
    (finding,) = setup_probes.packages()
    assert finding.level == "note" and "runs from its sources" in finding.text


def test_repository_has_one_address() -> None:
    urls = project()["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    owner = urls["Repository"].rsplit("/", 1)[0]
    assert set(matches(re.compile(re.escape(owner)))) == {"pyproject.toml"}


def test_scripts_can_read_the_name() -> None:
    """The script `scripts/image` reads the distribution's name from the project file with sed."""
    line = next(
        line for line in (ROOT / "scripts/image").read_text(encoding="utf-8").splitlines() if "^name = " in line
    )
    done = subprocess.run(
        ["bash", "-c", f'{line}; echo "$distribution"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == NAME
