"""`bridle runtime`: runs the control runtime without an engine, and replays traces of its exchanges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bridle.cli.control_options import ControlOptions
from bridle.cli.terminal import harmless
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.aici.client.replay import ReplyDifference

_MAX_SHOWN_CHARS = 2_000


def runtime(*arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Run the control runtime by itself.

    The runtime hosts controllers for an engine over shared memory. `bridle runtime --help` lists its own options.
    """
    from bridle.aici.runtime.main import main

    return main(arguments)


def replay_exchanges(trace: Path, name: str, revision: str | None, control: ControlOptions) -> int:
    """Replay the trace of a control runtime on a new runtime, with the vocabulary of model `name`. Returns 1 if any
    reply differs, else 0."""
    from bridle.load_progress import shown

    num_same = num_other = 0
    with shown(f"Replaying {trace}", prints=True) as progress:
        progress("starting the control runtime", 0.0)
        total = count_exchanges(trace)
        for difference in played_exchanges(trace, name, revision, control):
            if difference is None:
                num_same += 1
            else:
                num_other += 1
                print("\n".join(lines_of(difference, str(trace))))
            done = num_same + num_other
            progress(f"{done} of {total} exchanges", done / max(total, done))
    print(f"{num_same + num_other} exchanges, {num_other} with another reply")
    return 1 if num_other else 0


def played_exchanges(
    trace: Path, name: str, revision: str | None, control: ControlOptions
) -> Iterator[ReplyDifference | None]:
    """Replay the exchanges of a trace. Yields the difference of each reply; None if the reply is equal."""
    from bridle.aici.client.replay import replay as play
    from bridle.model.hub_lookup import resolve_model
    from bridle.serving.controller_runtime import guess_num_logits

    settings = replace(control, control_prepare=False).to_settings()
    if (obstacle := settings.obstacle()) is not None:
        raise InvalidRequest(f"no control runtime can be started: {obstacle}")
    folder = resolve_model(name, revision)
    return play(trace, settings.runtime_config(folder, guess_num_logits(folder)))


def count_exchanges(trace: Path) -> int:
    """Return the number of exchanges in a trace of a control runtime."""
    from bridle.traces import ExchangeRecord, read_records

    return sum(isinstance(record, ExchangeRecord) for _, record in read_records(trace))


def lines_of(difference: ReplyDifference, file: str) -> list[str]:
    """Return lines that show a difference between two exchanges."""
    return [
        f"{file}:{difference.line}: {difference.operation}",
        f"  recorded: {_shown(difference.expected)}",
        f"  now:      {_shown(difference.got)}",
    ]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return harmless(text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "...", on_one_line=True)
