"""`bridle runtime`: the control runtime by itself, and traces of its messages played again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from bridle.cli.serve import ControlOptions
from bridle.errors import InvalidRequest

_MAX_SHOWN_CHARS = 2_000


def runtime(*arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Host controllers for an engine, over shared memory. `bridle runtime --help` lists its own options."""
    from bridle.aici.runtime.main import main

    return main(arguments)


def play_messages(trace: Path, name: str, revision: str | None, control: ControlOptions) -> int:
    """Play what `bridle serve --aici-trace FILE` wrote against a fresh runtime, for the vocabulary of model `name`.
    Returns 1 if any reply differs."""
    from bridle.aici.client.replay import replay as play
    from bridle.model.resolve import resolve_model
    from bridle.service.control import guess_num_logits

    settings = replace(control, control_prepare=False).to_settings()
    if (obstacle := settings.obstacle()) is not None:
        raise InvalidRequest(f"no control runtime can be started: {obstacle}")
    folder = resolve_model(name, revision)
    num_same = num_other = 0
    for difference in play(trace, settings.runtime_config(folder, guess_num_logits(folder))):
        if difference is None:
            num_same += 1
            continue
        num_other += 1
        print(f"{trace}:{difference.line}: {difference.operation}")
        print(f"  recorded: {_shown(difference.expected)}")
        print(f"  now:      {_shown(difference.got)}")
    print(f"{num_same + num_other} exchanges, {num_other} with another reply")
    return 1 if num_other else 0


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."
