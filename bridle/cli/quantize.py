"""`bridle quantize`: writes a checkpoint with quantized weights."""

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
    """Write a model with weights in fewer bits.

    The result is a GGUF file, or a folder for `int8`. `bridle serve OUT` serves it; llama.cpp reads the GGUF files,
    too.

    Parameters
    ----------
    name
        Model to read: folder, hub id or `demo`.
    out
        File to write; for `int8` a folder.
    type
        Type of the weights: `Q4_K_M`, `Q5_K_M`, `Q6_K`, `Q8_0`, `Q4_0`, `Q5_0`, `Q4_K_S`, `Q5_K_S`; unquantized
        `F32`, `F16`, `BF16`; `int8` as with `--quantization int8`.
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
