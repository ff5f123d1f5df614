"""`bridle quantize`: a checkpoint with weights in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bridle.cli.preflight import check_models


def quantize(
    name: Annotated[str, Parameter(name="MODEL")],
    out: Annotated[Path, Parameter(name="OUT")],
    /,
    *,
    type: str = "Q4_K_M",  # noqa: A002  (the flag's name)
    revision: str | None = None,
) -> int:
    """Write a model anew with weights in fewer bits: a GGUF file, or a folder in 8 bits.

    What is written is served by `bridle serve OUT`; GGUF files are read by llama.cpp as well.

    Parameters
    ----------
    name
        Folder, hub id or `demo`.
    out
        The file to write; for `int8` the folder.
    type
        `Q4_K_M`, `Q5_K_M`, `Q6_K`, `Q8_0`, `Q4_0`, `Q5_0`, `Q4_K_S`, `Q5_K_S`, or as they
        are `F32`, `F16`, `BF16`; `int8` is what `--quantization int8` makes while loading.
    revision
        Branch, tag or commit of a hub model.
    """
    check_models(name, revision=revision)
    from bridle.load_progress import shown

    with shown(f"Quantizing {name}", prints=True) as progress:
        from bridle.serving.models.export import quantize_model

        written = quantize_model(name, out, type, revision, progress)
    print(written)
    return 0
