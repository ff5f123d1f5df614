"""The names of the standard controllers: plain names, tags and `gh:` references, as in AICI."""

from __future__ import annotations

from bridle.controllers.standard import names

#: The repository of AICI's own controllers. A reference with a version means exactly that release, which is not shipped
#: with bridle.
_RELEASES = "gh:microsoft/aici/"
_LATEST = "latest"


def standard_name(reference: str) -> str | None:
    """Return the standard controller that a reference means; None for other references.

    References to `jsctrl` are `jsctrl`, `jsctrl-latest`, `js-latest`, `gh:microsoft/aici/jsctrl` and
    `gh:microsoft/aici/jsctrl/latest`. A `gh:` reference may have `aici_jsctrl`, the name of a release's file, instead
    of `jsctrl`.
    """
    if reference.startswith(_RELEASES):
        reference = reference.removeprefix(_RELEASES).removesuffix(f"/{_LATEST}")
        return _known(reference.removesuffix(".wasm").removeprefix("aici_"))
    if reference.endswith(f"-{_LATEST}"):
        name = reference.removesuffix(f"-{_LATEST}")
        return _known(name) or _known(f"{name}ctrl")
    return _known(reference)


def _known(name: str) -> str | None:
    return name if name in names() else None
