"""`bridle new-controller`: creates a folder for the user's own controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Language = Literal["c", "js", "python", "assemblyscript", "rust"]
_HERE = Path()


def new_controller(
    name: Annotated[str, Parameter(name="NAME")],
    /,
    *,
    lang: Annotated[Language, Parameter(name=["--lang", "-l"])] = "js",
    module: Annotated[bool, Parameter(negative="")] = False,
    into: Annotated[Path, Parameter(name="--into")] = _HERE,
) -> int:
    """Create a folder with a small controller and its tests.

    `js` and `python` are scripts, which the server's `jsctrl` and `pyctrl` run; they need no tool chain. The others
    become WebAssembly modules: `c` with the Python package ziglang, `assemblyscript` with npm, `rust` with rustc.

    Parameters
    ----------
    name
        Name of the folder and of the tag that `make upload` sets: lowercase letters, digits and dashes.
    lang
        Language of the controller.
    module
        Build a module with a Python interpreter instead of a Python script.
    into
        Folder in which the new folder is created. Default: the current folder.
    """
    from bridle.controllers import templates

    made = templates.new_controller(name, lang, into, as_module=module)
    for path in made.files:
        print(path)
    print(f"\nThe controller is {made.first}; next: cd {made.folder} && make && make test")
    return 0
