"""`bridle detect`: tests a text for an operator's watermark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bridle.errors import InvalidRequest

#: The maximum number of characters of a text.
MAX_CHARS = 10_000_000


def detect(
    file: Annotated[Path, Parameter(name="FILE")],
    /,
    *,
    model: str,
    key_file: Path,
    gamma: float = 0.25,
    context: int = 1,
    revision: str | None = None,
) -> int:
    """Test a text for the watermark that a policy writes.

    Prints the z-score, the p-value and the number of scored tokens. The exit code is 0 if the p-value is below 0.001,
    else 1.

    Parameters
    ----------
    file
        File of the text; `-` reads standard input.
    model
        Model that wrote the text: folder, GGUF file, hub id or `demo`. Only the model's tokenizer is read.
    key_file
        File of the policy's key.
    gamma
        Share of green tokens, as in the policy.
    context
        Number of last tokens that choose the green list, as in the policy.
    revision
        Branch, tag or commit of a hub model.
    """
    from bridle.model.hub_lookup import resolve_model
    from bridle.sampling_values import Watermark
    from bridle.tokenizer import Tokenizer
    from bridle.watermark import detect as test
    from bridle.watermark import read_key

    mark = Watermark(gamma, key=read_key(key_file), context=context)  # validates both numbers
    text = sys.stdin.read() if str(file) == "-" else _read(file)
    if len(text) > MAX_CHARS:
        raise InvalidRequest(f"FILE: got {len(text)} characters; at most {MAX_CHARS}. Test a part of the file.", "file")
    tokens = Tokenizer.load(resolve_model(model, revision)).encode(text, add_special_tokens=False)
    found = test(tokens, mark.key, mark.gamma, mark.context)
    print(f"z-score  {found.z:.2f}")
    print(f"p-value  {found.p_value:.3g}")
    print(f"tokens   {found.num_scored} scored, {found.num_green} green")
    return 0 if found.p_value < 0.001 else 1


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidRequest(f"FILE: {file} cannot be read: {error.strerror or error}", "file") from None
