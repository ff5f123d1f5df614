"""The operator's files of tools and policies on a Ray cluster. The files are checked when the application is deployed,
and read by each front.

Engines get only a list of the tools.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from bridle.controller_tools import ToolExecutor
from bridle.distributed.replica_tools import check_limits
from bridle.distributed.tool_messages import ToolsElsewhere
from bridle.launch.ray.settings import RaySettings
from bridle.serving.policies import read_policies


class OperatorFiles(NamedTuple):
    """Information about the operator's files for engines: the list of `tools`, and a `version` that changes with the
    files' content."""

    tools: ToolsElsewhere
    version: str


def read_files(settings: RaySettings) -> OperatorFiles:
    """Read the files once. Raises `InvalidRequest` for an invalid file."""
    if settings.policies is not None:
        read_policies(Path(settings.policies))
    with closing(tools_of(settings)) as desk:
        check_limits(desk.limits)
        tools = ToolsElsewhere(desk.names, desk.of_clients, desk.limits)
    contents = [Path(file).read_bytes() for file in (settings.tools, settings.policies) if file is not None]
    return OperatorFiles(tools, " ".join(hashlib.sha256(content).hexdigest()[:16] for content in contents))


def tools_of(settings: RaySettings) -> ToolExecutor:
    """Return the tool executor for clients' tools, and for the operator's tools if there is a file. The caller must
    close the executor."""
    from bridle.controller_tools.config import read_tools

    return ToolExecutor() if settings.tools is None else read_tools(Path(settings.tools))
