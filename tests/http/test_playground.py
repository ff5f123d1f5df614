"""Tests of the playground's files: they match their sources, are small, need no key, and use no other hosts."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bridle.http import create_app, playground
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import local_client, scripted_model
from tests.sources import ROOT
from tests.waiting import PATIENCE

WEB = ROOT / "web"
FILES = ROOT / "bridle/http/playground/files"
HTML = {"accept": "text/html"}
MOST_BYTES = 600_000
WORD = "run `make web`, and commit what it built"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(scripted_model()) as made:
        yield made


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_of_sources() -> str:
    """Return the hash of the playground's sources, computed like in web/build.mjs."""
    names = ["build.mjs", "icon.svg", "index.html", "package-lock.json", "package.json", "tsconfig.json"]
    names += [f"src/{path.name}" for path in (WEB / "src").iterdir()]
    return sha256("".join(f"{sha256((WEB / name).read_bytes())}  {name}\n" for name in sorted(names)).encode())


def test_what_ships_was_built_from_these_sources() -> None:
    manifest = json.loads((FILES / "manifest.json").read_text())
    assert manifest["sources"] == hash_of_sources(), WORD
    names = [*playground.TYPES, "licenses.txt"]
    assert manifest["files"] == {name: sha256((FILES / name).read_bytes()) for name in names}, WORD
    assert {path.name for path in FILES.iterdir()} == {*names, "manifest.json"}


@pytest.mark.slow
def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here")
    folder = tmp_path / "web"
    shutil.copytree(WEB, folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(FILES, tmp_path / "bridle/http/playground/files")
    install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    fetched = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    if fetched.returncode != 0:
        pytest.skip(f"the packages cannot be fetched here: {fetched.stderr.strip()[-200:]}")
    command = ["node", "build.mjs", "--check"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert built.returncode == 0, built.stdout + built.stderr


def test_the_lock_file_has_hashes_and_names_no_host() -> None:
    lock = json.loads((WEB / "package-lock.json").read_text())
    packages = {name: each for name, each in lock["packages"].items() if name}
    assert packages and all("integrity" in each for each in packages.values())
    assert "resolved" not in (WEB / "package-lock.json").read_text()
    own = json.loads((WEB / "package.json").read_text())
    versions = [*own["dependencies"].values(), *own["devDependencies"].values()]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)


def test_the_playground_is_small() -> None:
    assert sum(len(gzip.compress((FILES / name).read_bytes())) for name in playground.TYPES) < MOST_BYTES


def test_nothing_is_loaded_from_elsewhere(client: TestClient) -> None:
    answer = client.get("/", headers=HTML)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
    assert not re.search(r"https?://|<style|\son\w+=|\sstyle=|<script(?![^>]+src)", answer.text)
    for address in re.findall(r"(?:src|href)=\"([^\"]+)\"", answer.text):
        if address.startswith("playground/"):
            assert client.get(f"/{address}").status_code == 200
    assert not re.search(r"url\(|@import", client.get("/playground/style.css").text)


@pytest.mark.parametrize("name", sorted(playground.TYPES))
def test_files_come_compressed_and_only_once(client: TestClient, name: str) -> None:
    path = "/" if name == playground.PAGE else f"/playground/{name}"
    answer = client.get(path, headers=HTML)
    assert answer.content == (FILES / name).read_bytes()
    assert answer.headers["content-encoding"] == "gzip"
    plain = client.get(path, headers=HTML | {"accept-encoding": "identity"})
    assert plain.content == answer.content and "content-encoding" not in plain.headers
    again = client.get(path, headers=HTML | {"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("name", ["manifest.json", "index.html", "..%2f__init__.py", "nothing"])
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"/playground/{name}").status_code == 404


def test_it_opens_without_a_key(tmp_path: Path) -> None:
    registry = ModelRegistry([scripted_model()])
    with TestClient(create_app(registry, keys=KeyStore(tmp_path / "keys.json"))) as locked:
        for path in ("/", *playground.PATHS):
            assert locked.get(path, headers=HTML).status_code == 200
            assert locked.post(path).status_code == 401
    registry.close()
