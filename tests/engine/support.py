"""What the engine's tests share: making requests and sequences, and draining an engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count

from bridle.engine.request import Request
from bridle.engine.sequence import Sequence, root_key
from bridle.sampling import SamplingParams

_ids = count()


def make_request(prompt: Seq[int] = (1, 2, 3), **fields: object) -> Request:
    """A request with an id of its own; sampling parameters may be given by name."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__slots__}
    if sampling:
        fields["sampling"] = SamplingParams(**sampling)  # type: ignore[arg-type]
    fields.setdefault("id", f"request-{next(_ids)}")
    return Request(prompt=tuple(prompt), **fields)  # type: ignore[arg-type]


def make_sequence(seq_id: int, tokens: Seq[int], *, max_len: int = 64, **fields: object) -> Sequence:
    """A sequence as the engine makes it for a fresh request."""
    request = make_request(tokens, **fields)
    return Sequence(
        id=seq_id,
        request=request,
        index=0,
        tokens=list(tokens),
        num_prompt=len(tokens),
        sampling=request.sampling,
        max_len=max_len,
        key=root_key(seq_id),
    )
