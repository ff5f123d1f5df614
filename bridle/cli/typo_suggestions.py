"""Suggestions for misspelled commands and flags."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.compat.suggestions import closest

#: Commands of other programs, and bridle's command for each.
_ELSEWHERE = {
    "complete": "generate",
    "completion": "generate",
    "download": "pull",
    "fetch": "pull",
    "get": "pull",
    "info": "doctor",
    "ls": "list",
    "models": "list",
    "start": "serve",
    "status": "ps",
    "up": "serve",
}


def unknown_command(word: str, known: Sequence[str]) -> str:
    """Return the error message about an unknown command."""
    meant = _ELSEWHERE.get(word.lower())
    meant = meant if meant in known else closest(word, known, 0.5)
    if meant is None:
        return f'Unknown command "{word}". There are: {", ".join(known)}'
    return f'Unknown command "{word}". Did you mean "{meant}"?'


def unknown_flag(flag: str, command: str) -> str:
    """Return the error message about an unknown flag of a command such as `serve` or `keys add`."""
    from bridle.cli.help_search import command_names

    names = command_names(command)
    known = {name for name in names if name.startswith("--")}
    takes_model = "MODEL" in names or command == "generate"  # `generate` parses its own words
    meant = closest(flag.partition("=")[0], known | ({"--model"} if takes_model else set()))
    if meant == "--model" and takes_model:
        return f"Unknown option: {flag}. Did you mean --model? The model needs no flag: `bridle {command} MODEL`"
    return f"Unknown option: {flag}." + ("" if meant is None else f" Did you mean {meant}?")
