"""Reads a settings file: YAML with a section per command, whose entries are the command's flags and arguments by
name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cyclopts import App, ArgumentCollection, Token
from cyclopts.config import Dict, Yaml


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Sets values from a settings file that neither the command line nor the environment sets. In contrast to the
    reader of cyclopts, this class also sets positional arguments, such as MODEL from `model: demo`. An unknown entry is
    refused, and the error names the nearest known entry."""

    path: str

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        data: Any = Yaml(self.path, must_exist=True).config
        section = data
        for command in commands:
            section = section.get(command) if isinstance(section, dict) else None
        if isinstance(section, dict):
            flags = {name: value for name, value in section.items() if not self._fill(arguments, str(name), value)}
            data = _nested(commands, flags)
        Dict(data, source=self.path)(app, commands, arguments)

    def _fill(self, arguments: ArgumentCollection, name: str, value: Any) -> bool:
        """Set the argument `name` to the value, or to the values of a list. Returns False if the command has no such
        argument."""
        found = next((argument for argument in arguments if name.upper() in argument.names), None)
        if found is None:
            return False
        if not found.has_tokens:
            for index, one in enumerate(value if isinstance(value, list) else [value]):
                found.append(Token(keyword=name, value=str(one), source=self.path, index=index))
        return True


def _nested(commands: tuple[str, ...], section: dict[str, Any]) -> dict[str, Any]:
    """Return the command's section of the file, nested under the names in `commands`."""
    for command in reversed(commands):
        section = {command: section}
    return section
