"""`bridle doctor`: checks whether this machine is ready for bridle, and says how to fix problems."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated

from cyclopts import Parameter

from bridle import __version__, os_sandbox
from bridle.cgroups import num_cores
from bridle.cli import setup_probes
from bridle.cli.setup_probes import Finding, Level, Probe

_MARKS = {"ok": "[green]     ok[/green]", "note": "[yellow]   note[/yellow]", "problem": "[red]problem[/red]"}
Port = Annotated[int, Parameter(negative="")]
_LOW_MEMORY = 2 << 30  # bytes; the demo model with its libraries needs about one GiB


def doctor(name: Annotated[str | None, Parameter(name="MODEL")] = None, /, *, port: Port = 8080) -> int:
    """Check this machine for problems and say how to fix them.

    `bridle doctor Qwen/Qwen3-0.6B` also checks if that model can be served. The exit code is 1 if there is a problem.

    Parameters
    ----------
    name
        Model to check, too: folder or hub id.
    port
        Port that `bridle serve` will listen on.
    """
    from bridle.model.hub_lookup import hub_name, local_path

    if name is not None and local_path(name) is None:
        hub_name(name)  # an invalid name is refused before all other checks
    from rich.console import Console

    console = Console(highlight=False)
    findings = list(examine(port, name))
    for finding in findings:
        console.print(_MARKS[finding.level], end=" ")
        console.print(f"{finding.subject}: {finding.text}", markup=False, soft_wrap=True)
        if finding.advice:
            console.print(f"        {finding.advice}", style="dim", markup=False, soft_wrap=True)
    problems = sum(finding.level == "problem" for finding in findings)
    console.print(f"\n{problems} problem{'s' * (problems > 1)}" if problems else "\nno problems found", style="bold")
    return 1 if problems else 0


def examine(port: int, model: str | None = None) -> Iterator[Finding]:
    """Run all checks. Yields the findings in the order in which problems should be solved."""
    yield Finding("ok", "bridle", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")
    around = (setup_probes.packages, _libraries, _device, _memory, setup_probes.limits, setup_probes.files)
    settings = (setup_probes.variables, setup_probes.settings_file, setup_probes.surroundings)
    for probe in (*around, *settings, _demo_model, _control, _sandbox, _hub, lambda: _port(port)):
        yield from _guarded(probe)
    if model is not None:
        yield from _guarded(lambda: setup_probes.model(model))


def _guarded(probe: Probe) -> Iterator[Finding]:
    """Yield the findings of a check. An exception in the check is also reported as a finding, so that the other checks
    still run."""
    try:
        yield from probe()
    except Exception as error:
        name = getattr(probe, "__name__", "probe").strip("_<>")
        yield Finding("problem", name, f"{type(error).__name__}: {error}")


def _libraries() -> Iterator[Finding]:
    for name in ("torch", "transformers", "tokenizers", "fastapi", "uvicorn"):
        try:
            yield Finding("ok", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding("problem", name, "not installed", f"{sys.executable} -m pip install {name}")


def _device() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        yield Finding("ok", "device", f"{torch.cuda.get_device_name()} with {torch.version.cuda}")
        return
    cores = num_cores()
    threads = min(torch.get_num_threads(), cores)
    yield Finding("ok", "device", f"CPU, {cores} cores, {threads} threads compute")
    yield from _kernels()
    if cores < (there := os.cpu_count() or 1):
        yield Finding(
            "note", "cores", f"this process may use {cores} of {there}: its container or CPU affinity limits it"
        )


def _kernels() -> Iterator[Finding]:
    from bridle.cpu_kernels.library import choice

    found = choice()
    if found.kernels is not None:
        yield Finding("ok", "kernels", f"quantized models compute with {found.reason}")
    else:
        text = f"none fit this processor ({found.reason}): quantized models compute with plain torch, slowly"
        yield Finding("note", "kernels", text, "--quantization none is the faster choice here")


def _memory() -> Iterator[Finding]:
    import psutil

    free = psutil.virtual_memory().available
    level: Level = "ok" if free >= _LOW_MEMORY else "note"
    advice = "" if level == "ok" else "Only small models will fit; --kv-memory bounds the cache."
    yield Finding(level, "memory", f"{free / (1 << 30):.1f} GiB free", advice)


def _demo_model() -> Iterator[Finding]:
    from bridle.model.hub_lookup import resolve_model

    path = resolve_model("demo")
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if weights:
        yield Finding("ok", "demo model", f"{weights / 1e6:.1f} MB of weights")
    else:
        yield Finding("problem", "demo model", "its weights are not in the package", "install bridle again")


def _control() -> Iterator[Finding]:
    from bridle.serving.controller_runtime import ControlSettings, data_folder

    obstacle = ControlSettings().obstacle()
    if obstacle is not None:
        yield Finding("note", "controllers", "Wasm controllers are off", obstacle)
    else:
        yield Finding("ok", "controllers", f"the control runtime can start; modules are in {data_folder()}/controllers")


def _sandbox() -> Iterator[Finding]:
    walls = os_sandbox.available_walls()
    if os_sandbox.mode() == "off":
        yield Finding("note", "sandbox", f"{os_sandbox.VARIABLE}=off: only WebAssembly isolates controllers")
    elif not walls.missing:
        yield Finding("ok", "sandbox", f"controllers run under Landlock (ABI {walls.landlock}) and seccomp")
    for name, needs in walls.missing.items():
        yield Finding("note", "sandbox", f"{name} is missing in the sandbox of controllers", f"it needs {needs}")


def _hub() -> Iterator[Finding]:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Finding("note", "hub", "HF_HUB_OFFLINE is set: only models that are on this disk can be used")


def _port(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield Finding(
                "note", "port", f"{port} is not free to listen on: {error.strerror}", "serve with another --port"
            )
            return
    yield Finding("ok", "port", f"{port} is free")
