"""Checks of `bridle doctor` for packages, settings, files and limits of this machine. Each check yields its problems
with their solutions."""

from __future__ import annotations

import difflib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from bridle.demo import DEMO_MODELS
from bridle.distribution import NAME, install_hint

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` is the next step for the user."""

    level: Level
    subject: str
    text: str
    advice: str = ""


Probe = Callable[[], Iterator[Finding]]


#: Extras of the package, and the features that are missing without each.
EXTRAS = {
    "aici": "Wasm controllers",
    "cluster": "shards: models in separate processes",
    "otel": "traces",
    "llamacpp": "llama.cpp as the backend",
    "gguf": "writing GGUF files, and rare types of their weights",
    "controllers": "building controllers from their sources",
}
_PREFIX = "BRIDLE_"
#: Variables of bridle that do not set a flag.
_OTHER_VARIABLES = ("BRIDLE_CACHE", "BRIDLE_CACHE_LIMIT", "BRIDLE_CONFIG", "BRIDLE_FULL", "BRIDLE_MODELS")
#: Names that resemble variables of flags, with advice.
_WITHOUT_FLAG = {"BRIDLE_MODEL": "name the model on the command line, as in `bridle serve MODEL`; unset it"}
_LOW_SHARED_MEMORY = 64 << 20
_LOW_DISK = 2 << 30
_MANY_FILES = 4_096
_PROXIES = ("http_proxy", "all_proxy")


def packages() -> Iterator[Finding]:
    """Check that the packages bridle needs are installed in supported versions."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires(NAME) or ()]
    except metadata.PackageNotFoundError:
        yield Finding("note", "package", "bridle runs from its sources, so its requirements are not known")
        return
    for requirement in wanted:
        if "extra" in str(requirement.marker or "") or (requirement.marker and not requirement.marker.evaluate()):
            continue
        yield from _problem_with(requirement, "problem")
    for extra, purpose in EXTRAS.items():
        parts = [one for one in wanted if one.marker is not None and one.marker.evaluate({"extra": extra})]
        parts = [one for one in parts if one.name != NAME and not one.marker.evaluate({"extra": ""})]  # type: ignore[union-attr]
        missing = [finding for one in parts for finding in _problem_with(one, "note")]
        if missing:
            text = "; ".join(f"{finding.subject} {finding.text}" for finding in missing)
            yield Finding("note", extra, f"{purpose}: {text}", install_hint(extra))


def _problem_with(requirement: Any, level: Any) -> Iterator[Finding]:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        yield Finding(level, requirement.name, "is not installed", f"{sys.executable} -m pip install '{requirement}'")
        return
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"is of version {version}; {requirement.specifier} is needed"
        yield Finding(level, requirement.name, text, f"{sys.executable} -m pip install '{requirement}'")


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Find misspelled environment variables, which resemble the variables of flags but have no effect."""
    from bridle.cli.help_search import variable_names

    named = [name for name in sorted(environment) if name.startswith(_PREFIX) and name not in _OTHER_VARIABLES]
    own = variable_names("serve") if named else set()
    known = variable_names() if not own.issuperset(named) else own
    for name in named:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = _WITHOUT_FLAG.get(name) or (f"is it {near[0]}?" if near else "see `bridle help`; unset it")
            yield Finding("problem", name, "is not a setting of bridle and has no effect", advice)


def settings_file(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that the file in BRIDLE_CONFIG can be read, and that all of its entries are known."""
    path = environment.get("BRIDLE_CONFIG")
    if not path:
        return
    from cyclopts.config import Yaml

    from bridle.cli.help_search import flag_names

    try:
        data = Yaml(path, must_exist=True).config
    except Exception as error:  # any error of the YAML reader
        text = f"{path} cannot be read: {' '.join(str(error).split())}"
        yield Finding("problem", "settings file", text, "correct it, or unset BRIDLE_CONFIG")
        return
    known, complaints = flag_names(), 0
    for command, section in (data or {}).items():
        for word, names in _strange(command, section, known):
            complaints += 1
            near = difflib.get_close_matches(word, names, 1)
            text = f"{path}: {word!r} is unknown in this section and has no effect"
            yield Finding("problem", "settings file", text, f"is it {near[0]}?" if near else "")
    if not complaints:
        yield Finding("ok", "settings file", path)


def _strange(command: object, section: object, known: Mapping[str, set[str]]) -> Iterator[tuple[str, set[str]]]:
    """Yield each unknown name in a section of a settings file, with the names that are known there."""
    if not isinstance(command, str) or command not in known:
        yield str(command)[:80], set(known)
        return
    for name in section if isinstance(section, dict) else ():
        if str(name).replace("_", "-") not in known[command]:
            yield str(name)[:80], known[command]


def files() -> Iterator[Finding]:
    """Check that bridle's folders are writable, and that other users cannot read the file of keys."""
    from bridle.serving.controller_runtime import data_folder

    folder = data_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".doctor").touch()
        (folder / ".doctor").unlink()
    except OSError as error:
        advice = "set XDG_DATA_HOME to a writable folder"
        yield Finding("problem", "data folder", f"no file can be written to {folder}: {error.strerror}", advice)
    keys = folder / "keys.db"
    if keys.exists() and keys.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Finding("problem", "keys", f"{keys} can be read by other users", f"chmod 600 {keys}")


def limits() -> Iterator[Finding]:
    """Check shared memory, disk space, and the limit of open files."""
    import shutil

    shared = Path("/dev/shm")  # noqa: S108 - the control runtime's shared memory is here
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < _LOW_SHARED_MEMORY:
        advice = "give the container more, as with `docker run --shm-size 1g`"
        yield Finding("note", "shared memory", f"{free >> 20} MiB free; controllers need shared memory", advice)
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache")
    home = next((path for path in (cache, *cache.parents) if path.exists()), Path("/"))
    if (free := shutil.disk_usage(home).free) < _LOW_DISK:
        yield Finding(
            "note", "disk", f"{free / (1 << 30):.1f} GiB free at {home}", "models are stored there: free some space"
        )
    yield from _descriptors()


def _descriptors() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # the module does not exist on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _MANY_FILES:
        text = f"at most {hard} files and connections may be open at once"
        yield Finding("note", "descriptors", text, f"raise it for many clients: `ulimit -n {_MANY_FILES}`")


def surroundings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check for proxies between clients and a server on this machine, and for traces that cannot be sent."""
    from importlib.util import find_spec

    from bridle import telemetry

    lower = {name.lower(): value for name, value in environment.items()}
    if any(lower.get(name) for name in _PROXIES) and "localhost" not in lower.get("no_proxy", ""):
        advice = "set NO_PROXY=localhost,127.0.0.1"
        yield Finding(
            "note", "proxy", "clients on this machine may send requests for http://localhost to the proxy", advice
        )
    if telemetry.wants_traces(environment):
        if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
            advice = f"{install_hint('otel')}, or unset the OTEL_* variables"
            yield Finding("problem", "traces", "are switched on, but their packages are missing", advice)
        else:
            yield Finding("ok", "traces", f"go to {environment.get(telemetry.ENDPOINT) or 'where OTEL_* says'}")


def model(name: str) -> Iterator[Finding]:
    """Check whether a local checkpoint can be served: files, architecture, size."""
    import psutil

    from bridle.errors import BridleError
    from bridle.model.checkpoint import inspect_checkpoint
    from bridle.model.pooling.settings import read_pooling
    from bridle.model.support_checks import max_positions, read_config

    try:
        folder = _local_folder(name)
        if folder is None:
            yield Finding("note", f"model {name}", "is not on this disk; `bridle serve` fetches it from the hub")
            return
        checkpoint = inspect_checkpoint(folder)
        pooling = read_pooling(folder)
        config = read_config(checkpoint, pools=pooling is not None)
    except BridleError as error:
        yield Finding("problem", f"model {name}", str(error))
        return
    needed, free = checkpoint.weight_bytes(4, keeps_blocks=True), psutil.virtual_memory().available
    text = f"{config.model_type}, {checkpoint.num_values / 1e6:.0f} million weights, context {max_positions(config)}"
    text += "" if pooling is None else f"; {'computes embeddings' if pooling.task == 'embed' else 'classifies texts'}"
    if needed > free:
        text += f"; on a CPU they take {needed / (1 << 30):.1f} GiB, and {free / (1 << 30):.1f} are free"
        yield Finding("note", f"model {name}", text, "--quantization int8 takes a quarter, --dtype bfloat16 half")
    else:
        yield Finding("ok", f"model {name}", text)
    if pooling is None:
        yield from _chat(name, folder)


def _chat(name: str, folder: Path) -> Iterator[Finding]:
    from bridle.chat.chat_format import chat_format, summary
    from bridle.chat.tool_parsers.formats import UNKNOWN
    from bridle.errors import BridleError
    from bridle.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    try:
        found = chat_format(tokenizer)
    except BridleError as error:
        yield Finding("problem", f"chat of {name}", str(error))
        return
    if found is not None:
        is_known = found["tool_format"]["name"] != UNKNOWN
        advice = "--tool-format and --reasoning-format set other formats."
        yield Finding("ok" if is_known else "note", f"chat of {name}", summary(tokenizer), advice)


def _local_folder(name: str) -> Path | None:
    """Return a model's folder on this disk, or None if the model is not downloaded. Raises an error if the name is
    invalid."""
    from bridle.model import resolve_model

    if name in DEMO_MODELS or Path(name).expanduser().exists():
        return resolve_model(name)
    from huggingface_hub import try_to_load_from_cache

    if "/" in name and not name.startswith(("/", ".", "~")):
        found = try_to_load_from_cache(name.partition(":")[0], "config.json")
        return Path(found).parent if isinstance(found, str) else None
    return resolve_model(name)
