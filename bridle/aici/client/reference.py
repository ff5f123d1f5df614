"""Names of Wasm controllers in requests."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.aici.protocol import LOCAL, Auth


@dataclass(frozen=True, slots=True)
class WasmController:
    """A controller in the runtime's module store, named by a module id (64 hex digits), a tag, or a `gh:` reference.

    `argument` is the program or configuration with which the controller starts. `auth` is the user for whom the
    controller runs. If `is_demanded`, an operator's policy requires the controller, which then runs in a separate
    runtime.
    """

    module: str
    argument: str = ""
    auth: Auth = LOCAL
    is_demanded: bool = False
