"""External data of recipes, from packages that the user installed in FOLDER/packages."""

from __future__ import annotations

from pathlib import Path

from bridle.errors import UnsupportedFeature

_packages: Path | None = None


def use(folder: Path | None) -> None:
    """Set the folder whose subfolder `packages` is searched."""
    global _packages
    _packages = None if folder is None else folder / "packages"


def find(pattern: str, command: str) -> Path:
    """Return the first path in the packages that matches `pattern`. Raises `UnsupportedFeature` with the command that
    installs the package."""
    found = sorted(_packages.glob(pattern)) if _packages is not None else []
    if not found:
        raise UnsupportedFeature(
            f"its data is not in FOLDER/packages: `{command} FOLDER/packages`, with --folder FOLDER"
        )
    return found[0]
