"""The environment variable of each flag: `--max-num-seqs` is `BRIDLE_MAX_NUM_SEQS`.

A variable means the same for every command that reads it. Where a flag of a command means something else than a flag
of that name usually does, its variable has the command's name: `bridle explain --schema` is `BRIDLE_EXPLAIN_SCHEMA`.
Arguments without a flag, such as MODEL, have no variable, and short or negative flags have none of their own.
"""

from __future__ import annotations

import os

from cyclopts import App, Argument, ArgumentCollection, Parameter, Token
from cyclopts.config import Env

PREFIX = "BRIDLE_"
#: Flags that mean something else under a command than under others.
_OWN: dict[str, frozenset[str]] = {
    "adapters list": frozenset({"--model"}),
    "adapters load": frozenset({"--model", "--revision"}),
    "adapters unload": frozenset({"--model"}),
    "chat": frozenset({"--adapter"}),
    "check": frozenset({"--quantization"}),
    "detect": frozenset({"--model"}),
    "explain": frozenset({"--schema", "--tokens"}),
    "generate": frozenset({"--adapter"}),
    "infer": frozenset({"--adapter", "--log-level"}),
    "lmtp": frozenset({"--tokenizer"}),
    "replay": frozenset({"--adapter", "--save"}),
    "run": frozenset({"--adapter", "--log-level"}),
    "run-batch": frozenset({"--model", "--trace"}),
    "test": frozenset({"--model", "--tokenizer"}),
}


def variables_of(command: str, argument: Argument) -> list[str]:
    """The variables that set an argument of a command, such as `serve` or `keys add`; the usual one first."""
    names = argument.parameter.name or ()
    return [_variable(command, name) for name in names if name.startswith("--")]


def _variable(command: str, flag: str) -> str:
    path = command if flag in _OWN.get(command, ()) else ""
    return PREFIX + "_".join(f"{path} {flag.lstrip('-')}".split()).replace("-", "_").upper()


class EnvironmentDefaults(Env):
    """Fills in the values that a command line does not set. cyclopts' own class has one name for all commands, and
    reads arguments without a flag, too."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        done: set[str] = set()  # a flag that is in two groups of a command belongs to the first, as on a command line
        for argument in arguments:
            names = [] if argument.children else variables_of(" ".join(commands), argument)
            found = next((name for name in names if name in os.environ and name not in done), None)
            done.update(names)
            if found is not None and not argument.has_tokens:
                for index, value in enumerate(argument._split_env_value(os.environ[found])):
                    argument.append(Token(keyword=found, value=value, source=self.source, index=index))

    def _convert_argument(self, commands: tuple[str, ...], argument: Argument) -> str:
        """The variable that help pages show. cyclopts asks for one even where there is none: that is hidden."""
        names = variables_of(" ".join(commands), argument)
        if not names:
            argument.parameter = Parameter.combine(argument.parameter, Parameter(show_env_var=False))
        return names[0] if names else ""
