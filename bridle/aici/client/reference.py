"""Names of Wasm controllers in requests."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.aici.protocol import LOCAL, Auth


@dataclass(frozen=True, slots=True)
class WasmController:
    """A controller in the runtime's store: a module id (64 hex digits), a tag, or a `gh:` name.

    `argument` is the program or configuration it is started with; `auth` says on whose behalf. One that a policy of the
    operator's `is_demanded` lives in a runtime of its own.
    """

    module: str
    argument: str = ""
    auth: Auth = LOCAL
    is_demanded: bool = False
