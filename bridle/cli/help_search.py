"""`bridle help`: shows a command's help page, or every command and flag whose help contains some words.

The search uses the same data as the help pages, so its results always match the pages. A flag that
several commands share is listed once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Argument, Parameter

from bridle.cli.foreign_flags import advice
from bridle.cli.variables import variables_of

if TYPE_CHECKING:
    from rich.console import Console

_MIN_LIKENESS = 0.6


@dataclass(slots=True)
class HelpEntry:
    """A command or a flag: its names, its help text, its heading, and the commands that have it."""

    names: tuple[str, ...]
    text: str
    heading: str
    variable: str = ""
    "The environment variable that sets a flag."
    commands: list[str] = field(default_factory=list)

    @property
    def is_flag(self) -> bool:
        return self.names[0].startswith("-")

    def rank(self, words: list[str]) -> int | None:
        """Return the rank of a match of all `words`: 0 for a whole name, 1 for parts of names, 2 for the text. Returns
        None if a word does not match."""
        names = " ".join(self.names).lower()
        known = f"{names} {names.replace('-', ' ')} {self.variable.lower()} {self.text.lower()} {self.heading.lower()}"
        if not all(word in known for word in words):
            return None
        if any(word == name.lstrip("-") for word in words for name in self.names):
            return 0
        return 1 if all(word in names.replace("-", " ") + names for word in words) else 2


def help_(*words: Annotated[str, Parameter(name="WORD", allow_leading_hyphen=True)]) -> int:
    """Show a command's help, or find commands and flags by words.

    `bridle help serve` shows the page of a command, `bridle help kv memory` finds pages about both words.

    Parameters
    ----------
    words
        Command, or words that must all occur in the name, variable or description of a flag or command.
    """
    from bridle.cli.app import app, show_overview

    page = _page_of(app, words)
    if page == []:
        show_overview()
    elif page is not None:
        app([*page, "--help"], exit_on_error=False)
    if page is not None:
        return 0
    return _search([word.lower() for word in words])


@cache
def flag_names() -> dict[str, set[str]]:
    """Return the valid entries of a settings file for each command: the names of the command's flags and arguments,
    without dashes."""
    from bridle.cli.app import app

    return {
        name: {text.lstrip("-").lower() for argument in arguments_of(command) for text in argument.names}
        for name, command in commands_of(app, ())
    }


def command_names(path: str) -> set[str]:
    """Return the names of a command's flags (with dashes) and arguments, as its help page shows them."""
    from bridle.cli.app import app

    here = app
    for word in path.split():
        here = here[word]
    return {name for argument in arguments_of(here) if argument.parameter.show is not False for name in argument.names}


@cache
def variable_names(only: str | None = None) -> set[str]:
    """Return the environment variables of all flags (which takes half a second), or those of command `only`."""
    from bridle.cli.app import app

    return {
        variable
        for name, command in (commands_of(app, ()) if only is None else [(only, app[only])])
        for argument in arguments_of(command)
        for variable in variables_of(name, argument)
    }


def _page_of(app: App, words: tuple[str, ...]) -> list[str] | None:
    """Return the path of the command that `words` name; None if they name no command. Empty `words` mean the whole
    program."""
    here = app
    for word in words:
        if word.startswith("-") or word not in list(here):
            return None
        here = here[word]
    return list(words)


def _search(words: list[str]) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    entries = help_entries()
    ranked = [(rank, entry) for entry in entries if (rank := entry.rank(words)) is not None]
    for _, entry in sorted(ranked, key=lambda item: (item[1].is_flag, item[0])):
        _show(console, entry)
    if ranked:
        return 0
    elsewhere = [known for word in words if (known := advice("--" + word.lstrip("-"))) is not None]
    if elsewhere:
        console.print(f"as another server's flag: {'; '.join(elsewhere)}", markup=False)
        return 0
    console.print(f"nothing here speaks of {' '.join(words)!r}{_likely(entries, words)}", markup=False)
    return 1


def _show(console: Console, entry: HelpEntry) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if entry.is_flag:
        where = f"{entry.heading}; bridle {', '.join(entry.commands)}; {entry.variable}"
        title = Text.assemble((", ".join(entry.names), "bold cyan"), (f"  ({where})", "dim"))
    else:
        title = Text(f"bridle {entry.names[0]}", style="bold green")
    console.print(title, soft_wrap=True)
    console.print(Padding(Text(entry.text), (0, 0, 0, 4)))


def _likely(entries: Iterable[HelpEntry], words: list[str]) -> str:
    """Return a hint with names of commands and flags that resemble the typed words."""
    names = {name.lstrip("-") for entry in entries for name in entry.names}
    parts = {part for name in names for part in name.split("-")}
    near = [match for word in words for match in difflib.get_close_matches(word, names | parts, 3, _MIN_LIKENESS)]
    return f"; is it one of {', '.join(dict.fromkeys(near))}?" if near else "; see bridle --help"


@cache
def help_entries() -> tuple[HelpEntry, ...]:
    """Return an entry for each command, then for each flag. A flag that commands share has one entry."""
    from bridle.cli.app import app

    commands: list[HelpEntry] = []
    flags: dict[tuple[tuple[str, ...], str, str], HelpEntry] = {}
    for name, command in commands_of(app, ()):
        commands.append(HelpEntry((name,), first_paragraph(command.help), "Commands"))
        for entry in _flags(name, command):
            flags.setdefault((entry.names, entry.text, entry.variable), entry).commands.append(name)
    return (*commands, *flags.values())


def commands_of(app: App, path: tuple[str, ...]) -> Iterator[tuple[str, App]]:
    """Yield all commands below `path`, with their full names."""
    for word in app:
        if word.startswith("-") or (*path, word) == ("help",):
            continue
        name = (*path, word)
        yield " ".join(name), app[word]
        yield from commands_of(app[word], name)


def _flags(command_name: str, command: App) -> Iterator[HelpEntry]:
    for argument in arguments_of(command):
        names = tuple(name for name in argument.names if name.startswith("-"))
        if names and argument.parameter.show is not False:
            heading = _heading(argument.parameter.group)
            text = " ".join((argument.parameter.help or "").split())
            yield HelpEntry(names, text, heading, next(iter(variables_of(command_name, argument)), ""))


def _heading(group: object) -> str:
    """Return the heading under which help pages list a flag. cyclopts stores one group or several."""
    first = next(iter(group), "") if isinstance(group, Iterable) else group
    return str(getattr(first, "name", first or ""))


def arguments_of(command: App) -> Iterable[Argument]:
    """Return the arguments of a command; none for a group of commands."""
    if command.default_command is None:
        return ()
    return command.assemble_argument_collection(parse_docstring=True)


def first_paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().split("\n\n")[0].split())
