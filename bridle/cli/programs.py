"""Files with controllers, scripts or Wasm modules, that are sent to a server or used with a model that this process
loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.cli.api import Api
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.serving.models.loading import LoadedModel

#: The standard controller that runs a file, by the file name extension.
STANDARD = {
    ".py": "gh:microsoft/aici/pyctrl",
    ".js": "gh:microsoft/aici/jsctrl",
    ".json": "gh:microsoft/aici/declctrl",
}
_MODULE = ".wasm"
#: The fields that a file with a conversation may have.
_OF_CHATS = {"messages", "tools", "chat_template_kwargs"}
#: The file name extensions of controllers.
ENDINGS = (*STANDARD, _MODULE)


def check_program(path: Path) -> None:
    """Raise `InvalidRequest` for a file that no controller runs, or that does not exist."""
    if path.suffix not in ENDINGS:
        raise InvalidRequest(
            f"no standard controller runs the file {str(path)!r}; its name must end in {', '.join(ENDINGS)}",
            "controller",
        )
    if not path.is_file():
        raise InvalidRequest(f"there is no controller file {path}", "controller")


def controller_in(path: Path, model: LoadedModel) -> tuple[str, str | None]:
    """Return the name of the Wasm controller that runs a file, and its argument. If the file itself is a module, upload
    it to the model's runtime and return its id and None."""
    if path.suffix != _MODULE:
        return STANDARD[path.suffix], path.read_text(encoding="utf-8")
    from bridle.serving.controller_runtime import LOCAL_ADMIN, upload_module
    from bridle.serving.requests.steering import control_of

    return upload_module(control_of(model), path.read_bytes(), LOCAL_ADMIN).module_id, None


# -- programs for a server -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Program:
    """The program that `bridle run` runs: a controller by name or a file to upload, and the file with its argument.
    `names` are the controllers on the command line; all of them steer."""

    controller: str
    upload: Path | None
    file: str | None
    names: Sequence[str] = ()

    @property
    def files(self) -> list[Path]:
        return [Path(path) for path in (self.file, self.upload) if path is not None and path != "-"]

    def body(self, api: Api) -> dict[str, Any]:
        """Return the body of the request, with the current content of the files."""
        argument = _read(self.file)
        module = None if self.upload is None else str(api.upload(read_wasm(self.upload))["module_id"])
        return {"controller": module or self.controller, "controller_arg": argument} | further_controllers(self.names)


def further_controllers(names: Sequence[str]) -> dict[str, Any]:
    """Return a request's field `controllers` with all names except the first; empty if there is at most one name."""
    return {"controllers": list(names[1:])} if len(names) > 1 else {}


def program_to_run(file: str | None, ctrl: Sequence[str], upload: Path | None) -> Program:
    """Return the program that the arguments of `bridle run` mean."""
    if ctrl and upload is not None:
        raise InvalidRequest("give --ctrl or --upload, not both: the upload is the controller", "ctrl")
    if upload is not None:
        return Program("", upload, file)
    if not ctrl and file is not None and Path(file).suffix == _MODULE:
        return Program("", Path(file), None)
    return Program(ctrl[0] if ctrl else _standard(file), None, file, ctrl)


def _read(file: str | None) -> str:
    if file is None:
        return ""
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", "FILE") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not text: byte {error.start} is not UTF-8", "FILE") from None


def read_wasm(path: Path) -> bytes:
    """Return the bytes of a module for an upload. Raises `InvalidRequest`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", "WASM") from None


def read_messages(path: Path) -> dict[str, Any]:
    """Return the request fields in a file with a conversation. Raises `InvalidRequest`."""
    try:
        found = json.loads(_read(str(path)))
    except ValueError as error:
        raise InvalidRequest(f"--messages: {path} is not JSON: {error}", "messages") from None
    found = {"messages": found} if isinstance(found, list) else found
    if not isinstance(found, dict) or not isinstance(found.get("messages"), list) or found.keys() - _OF_CHATS:
        raise InvalidRequest(
            f"--messages: {path} must have a list of messages, or an object with {', '.join(sorted(_OF_CHATS))}",
            "messages",
        )
    return found


def _standard(file: str | None) -> str:
    """Return the standard controller for a script. Raises `InvalidRequest`, which lists the possible extensions and
    flags."""
    name = STANDARD.get(Path(file).suffix) if file else None
    if name is None:
        what = "there is nothing to run" if file is None else f"no standard controller runs {file!r}"
        known = ", ".join(STANDARD)
        raise InvalidRequest(
            f"{what}: give a file with the ending {known} or .wasm, or name a controller with --ctrl or --upload",
            "ctrl",
        )
    return name
