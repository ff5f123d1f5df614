"""Flags for the runtime of Wasm controllers, and for the tools that controllers may call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from bridle.controller_tools import ToolExecutor
    from bridle.http.settings import ServeSettings
    from bridle.serving.controller_runtime import ControlSettings
    from bridle.serving.models.model_loader import ModelLoader

_CONTROL = Group("Controllers", sort_key=7)


@Parameter(name="*", group=_CONTROL)
@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Flags for the runtime that hosts Wasm controllers."""

    control: Literal["auto", "on", "off"] = "auto"
    "Start the runtime of Wasm controllers; `auto` starts it if its packages are installed."
    controller_class: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Python controller that requests may choose as `class:NAME`: [NAME=]MODULE:CLASS, where MODULE is a module or a
    file. It runs in the server without a sandbox. Repeatable."""
    control_store: Path | None = None
    "Folder for uploaded controllers. Default: in the user's data folder."
    control_prepare: bool = True
    "Compile the standard controllers in the background, so that their first use is fast."
    aici_rt: str | None = None
    "Path of a control runtime that replaces bridle's own."
    aici_rtarg: Annotated[
        tuple[str, ...], Parameter(name=["--aici-rtarg", "-A"], negative="", allow_leading_hyphen=True)
    ] = ()
    "Argument for the control runtime. Repeatable."
    aici_dialect: Literal[1, 2] = 2
    "Protocol version of the control runtime."
    policy_rtarg: Annotated[tuple[str, ...], Parameter(negative="", allow_leading_hyphen=True)] = ()
    "Argument for the runtime of Wasm policies, such as `--policy-rtarg=--limit=max_memory=134217728`. Repeatable."
    aici_trace: Path | None = None
    """File to append a trace of the control runtime to, for `bridle replay`, `bridle explain` and `bridle test`. It
    grows to at most 1 GiB."""

    sandbox: Literal["strict", "best", "off"] | None = None
    """Operating-system sandbox for controllers, and for grammars and chat templates of clients. `strict` refuses to
    start if Landlock or seccomp is missing; `best` uses what the kernel has. Default: best."""

    def to_settings(self) -> ControlSettings:
        """Return the control settings. The sandbox that these flags choose applies to the whole process."""
        from bridle import os_sandbox
        from bridle.serving.controller_runtime import ControlSettings

        if self.sandbox is not None:
            os_sandbox.choose(self.sandbox)
        return ControlSettings(
            mode=self.control,
            runtime=self.aici_rt,
            args=self.aici_rtarg,
            dialect=self.aici_dialect,
            trace=self.aici_trace,
            store=self.control_store,
            prepare=self.control_prepare,
            policy_args=self.policy_rtarg,
        )


@Parameter(name="*", group=_CONTROL)
@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Flags for the tools that controllers may call."""

    tools: Path | None = None
    "TOML file of tools that controllers may call: Python functions, HTTP requests and MCP servers. See docs/tools.md."

    def desk(self) -> ToolExecutor | None:
        """Start the tools in the file. The caller must close the tools."""
        if self.tools is None:
            return None
        from bridle.controller_tools.config import read_tools

        return read_tools(self.tools)

    def add_to(self, settings: ServeSettings) -> ServeSettings:
        """Return the settings of a server with these tools."""
        if self.tools is None:
            return settings
        desk = self.desk()
        make_loader: Callable[..., ModelLoader] = settings.make_loader  # a function with a parameter `tools`
        return replace(settings, tools=desk, make_loader=partial(make_loader, tools=desk))
