"""The settings file: YAML whose sections are commands and whose entries are their flags, and arguments, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cyclopts import App, ArgumentCollection, Token
from cyclopts.config import Dict, Yaml


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Fills in the values that command line and environment do not set. cyclopts' own reader knows flags alone; here
    `model: demo` is the argument MODEL. An unknown entry is refused, with the nearest known one."""

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
        """Give the argument of that name its value, or its values; False if there is none."""
        found = next((argument for argument in arguments if name.upper() in argument.names), None)
        if found is None:
            return False
        if not found.has_tokens:
            for index, one in enumerate(value if isinstance(value, list) else [value]):
                found.append(Token(keyword=name, value=str(one), source=self.path, index=index))
        return True


def _nested(commands: tuple[str, ...], section: dict[str, Any]) -> dict[str, Any]:
    """The section alone, where it was."""
    for command in reversed(commands):
        section = {command: section}
    return section
