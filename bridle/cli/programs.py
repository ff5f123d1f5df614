"""Files with controllers, given to a model that is loaded here: scripts for the standard controllers, and modules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bridle.cli.control import STANDARD
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.service.loading import LoadedModel

_MODULE = ".wasm"
#: How the name of a controller's file ends.
ENDINGS = (*STANDARD, _MODULE)


def check_program(path: Path) -> None:
    """Refuse a file that nothing runs."""
    if path.suffix not in ENDINGS:
        raise InvalidRequest(
            f"no standard controller runs {str(path)!r}; it ends in {', '.join(ENDINGS)}", "controller"
        )
    if not path.is_file():
        raise InvalidRequest(f"there is no file {path}", "controller")


def controller_in(path: Path, model: LoadedModel) -> tuple[str, str | None]:
    """The name of the Wasm controller that runs a file, and its argument; None if the file is the controller itself,
    which is then kept by the model's runtime."""
    if path.suffix != _MODULE:
        return STANDARD[path.suffix], path.read_text(encoding="utf-8")
    from bridle.service.control import LOCAL_ADMIN, upload_module
    from bridle.service.steering import control_of

    return upload_module(control_of(model), path.read_bytes(), LOCAL_ADMIN).module_id, None
