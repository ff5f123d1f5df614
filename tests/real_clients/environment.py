"""Environments for Python and Node programs whose packages conflict with bridle's. Each environment is made once and
kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def foreign_python(*packages: str) -> Path:
    """Return the Python of an environment with only `packages`, pinned as `name==version`, and their dependencies."""
    return _made(_folder(packages), packages)


def layered_python(*packages: str) -> Path:
    """Return the Python of an environment with `packages` on top of all packages of this environment, bridle
    included."""
    here = sysconfig.get_path("purelib")
    folder = _folder((*packages, f"over {here}"))
    return _made(folder, (*packages, "-c", str(CONSTRAINTS)), f"import site; site.addsitedir({here!r})")


def _made(folder: Path, arguments: Sequence[str], path_line: str | None = None) -> Path:
    """Return the Python of an environment, which is made if missing; Python runs `path_line` at each start."""
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        venv.create(folder, with_pip=False, clear=True, symlinks=True)
        if path_line is not None:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "layer.pth").write_text(path_line + "\n")
        # Our own pip installs into the other environment: some systems ship no bundled one.
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *arguments]
        trusting = {name: value for name, value in os.environ.items() if name != "SSL_CERT_DIR"}
        subprocess.run(command, check=True, env=trusting)
        done.touch()
    return python


#: From which version on Node runs all of these clients.
MIN_NODE = 20


def foreign_node(*packages: str) -> dict[str, str]:
    """Return the environment variables with which Node finds only `packages`, pinned as `name@version`, and their
    dependencies. Skip the test if Node is missing."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed, and these clients are written in JavaScript")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    major = int(re.sub(r"^v(\d+).*", r"\1", said.strip()))
    if major < MIN_NODE:
        pytest.skip(f"node {said.strip()} is older than {MIN_NODE}, which these clients need")
    folder = _folder((*packages, f"node {major}"))
    done = folder / "complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}')
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", *packages]
        subprocess.run(command, check=True, cwd=folder, stdin=subprocess.DEVNULL)
        done.touch()
    return {"NODE_PATH": str(folder / "node_modules")}


def run_in_node(variables: Mapping[str, str], script: Path, *arguments: str) -> str:
    """Run a script in Node with additional environment variables; return its output, or fail with its errors."""
    return _printed(["node", str(script), *arguments], _environment() | variables)


def run_script(python: Path, script: Path, *arguments: str) -> str:
    """Run a script in another Python; return its output, or fail with its errors."""
    return _printed([str(python), str(script), *arguments], _environment())


def _printed(command: Sequence[str], environment: Mapping[str, str]) -> str:
    with tempfile.TemporaryDirectory() as folder:  # what clients leave behind
        own = {**environment, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=own)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _folder(packages: tuple[str, ...]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(repr((sys.version_info[:2], sorted(packages))).encode()).hexdigest()[:12]
    name = re.match(r"\W*\w+", packages[0])
    return cache / "bridle" / "genuine" / f"{name[0].strip('@') if name else 'clients'}-{key}"


def _environment() -> dict[str, str]:
    """Return the environment variables without settings of this process's Python and of Hugging Face packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}


OPENAI, ANTHROPIC = "openai==3.54.0", "anthropic==2.12.0"
#: Which packages a script is run with.
PYTHON = {
    "script_guidance.py": ("guidance==0.3.1", OPENAI),
    "script_instructor.py": ("instructor==1.17.0", ANTHROPIC),
    "script_langchain.py": ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7", OPENAI),
    "script_litellm.py": ("litellm==1.106.2", "mcp==2.3.0"),
    "script_outlines.py": ("outlines==1.3.3", OPENAI, "huggingface_hub==0.36.2", "aiohttp==3.14.5"),
    "script_pydantic_ai.py": ("pydantic-ai-slim[anthropic,openai]==2.68.0", OPENAI, ANTHROPIC),
}
