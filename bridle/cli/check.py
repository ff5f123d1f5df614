"""`bridle check`: compares bridle's computation of a checkpoint with the computation in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from bridle.cli.preflight import check_models


def check(
    name: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    revision: str | None = None,
    quantization: Literal["none", "auto", "int8", "q8_0", "q4_0"] = "none",
    text: Path | None = None,
) -> int:
    """Compare a model with transformers' own computation of it.

    The exit code is 0 if both agree, else 1.

    Parameters
    ----------
    name
        Model to check: folder, hub id or `demo`.
    revision
        Branch, tag or commit of a hub model.
    quantization
        Quantization to compare as well, by perplexity and share of unchanged most likely tokens; `auto` compares all.
    text
        File of text for the comparison of quantizations. Default: a short sample.
    """
    check_models(name, revision=revision)
    from bridle.load_progress import shown
    from bridle.model.hub_lookup import resolve_model

    with shown(f"Checking {name}", prints=True) as progress:
        path = resolve_model(name, revision)
        progress("comparing with transformers", 0.3)
        from bridle.model.check import check_model, check_quality

        report = check_model(path)
        qualities = []
        if quantization != "none":
            progress("comparing with itself quantized", 0.7)
            from bridle.model.quality import CANDIDATES, SAMPLE

            forms = CANDIDATES if quantization == "auto" else (quantization,)
            sample = SAMPLE if text is None else text.read_text(encoding="utf-8", errors="replace")
            qualities = check_quality(path, forms, sample)
    print(report)
    for quality in qualities:
        print(f"  {quality}")
    return 0 if report.is_equal else 1
