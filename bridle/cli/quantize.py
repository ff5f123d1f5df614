"""`bridle quantize`: a checkpoint with weights in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def quantize(
    name: Annotated[str, Parameter(name="MODEL")],
    out: Annotated[Path, Parameter(name="OUT")],
    /,
    *,
    type: str = "Q4_K_M",  # noqa: A002  (the flag's name)
    revision: str | None = None,
) -> int:
    """Write a model anew with weights in fewer bits, as a GGUF file.

    What is written is served by `bridle serve OUT`, and read by llama.cpp.

    Parameters
    ----------
    name
        Folder, hub id or `demo`.
    out
        The file to write.
    type
        `Q4_K_M`, `Q5_K_M`, `Q6_K`, `Q8_0`, `Q4_0`, `Q5_0`, `Q4_K_S`, `Q5_K_S`, or without loss `F32`, `F16`, `BF16`.
    revision
        Branch, tag or commit of a hub model.
    """
    from bridle.cli.loading import progress_bar

    with progress_bar(f"Quantizing {name}") as progress:
        from bridle.service.export import quantize_model

        written = quantize_model(name, out, type, revision, progress)
    print(written)
    return 0
