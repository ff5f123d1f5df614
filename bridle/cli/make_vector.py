"""`bridle make-vector`: makes a control vector from pairs of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from bridle.cli.options import ModelOptions
from bridle.cli.preflight import check_models
from bridle.errors import InvalidRequest


def make_vector(
    name: Annotated[str, Parameter(name="MODEL")],
    pairs: Annotated[Path, Parameter(name="PAIRS")],
    out: Annotated[Path, Parameter(name="OUT")],
    /,
    *,
    method: Literal["mean", "pca"] = "mean",
    model: ModelOptions = ModelOptions(),
) -> int:
    """Write a control vector made of pairs of prompts.

    The result is a GGUF file that `--load-control-vector NAME=OUT` loads; llama.cpp reads it, too.

    Parameters
    ----------
    name
        Model that the vector is for: folder, hub id, GGUF file or `demo`.
    pairs
        File of pairs in JSON lines, each an object with `positive` and `negative`: a text, or a list of messages.
    out
        GGUF file to write.
    method
        Direction of a layer, from the hidden states of the last tokens: `mean` difference of the pairs, or `pca`, first
        principal component of the differences.
    """
    check_models(name, revision=model.revision)
    rows = _read_lines(pairs)
    from bridle.llm import LLM
    from bridle.llm.vectors import pairs_of

    found = pairs_of(rows)
    with LLM(model.to_config(name, warm_up=False)) as llm:
        llm.make_control_vector(found, out, method=method)
    print(out)
    return 0


def _read_lines(path: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"pairs: got {path}; it must be a file of JSON lines: {error}", "pairs") from None
