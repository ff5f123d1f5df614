"""The name under which pip installs bridle. The name for pip differs from the package name that programs import."""

from __future__ import annotations

#: The name in pyproject.toml. `bridle` is another project on the package index.
NAME = "bridle-llm"


def install_hint(*extras: str) -> str:
    """Return the command that installs bridle with the optional dependencies `extras`."""
    return f"pip install '{NAME}[{','.join(extras)}]'"
