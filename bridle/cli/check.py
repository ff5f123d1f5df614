"""`bridle check`: does this checkpoint compute here what it computes in transformers?"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def check(
    name: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    revision: str | None = None,
) -> int:
    """Compare a model with transformers' own computation of it.

    The exit code is 0 if they agree and 1 if they do not.

    Parameters
    ----------
    name
        Folder, hub id or `demo`.
    revision
        Branch, tag or commit of a hub model.
    """
    from bridle.cli.loading import progress_bar
    from bridle.model.resolve import resolve_model

    with progress_bar(f"Checking {name}") as progress:
        path = resolve_model(name, revision)
        progress("comparing with transformers", 0.3)
        from bridle.model.parity import check_model

        report = check_model(path)
    print(report)
    return 0 if report.is_equal else 1
