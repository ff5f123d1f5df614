"""Names the environment variable of each flag. For example, `BRIDLE_MAX_NUM_SEQS` sets `--max-num-seqs`.

A variable has the same meaning for every command that reads it. If flags of the same name differ in meaning between
commands, the variable includes the command's name: `bridle explain --schema` is `BRIDLE_EXPLAIN_SCHEMA`. Arguments
without a flag, such as MODEL, have no variable, and short or negative flags have no variable of their own.
"""

from __future__ import annotations

import os

from cyclopts import App, Argument, ArgumentCollection, Parameter, Token
from cyclopts.config import Env

PREFIX = "BRIDLE_"
#: Flags that have another meaning in one command than in other commands.
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
    """Return the variables that set an argument of a command such as `serve` or `keys add`, the main variable first."""
    names = argument.parameter.name or ()
    return [_variable(command, name) for name in names if name.startswith("--")]


def _variable(command: str, flag: str) -> str:
    path = command if flag in _OWN.get(command, ()) else ""
    return PREFIX + "_".join(f"{path} {flag.lstrip('-')}".split()).replace("-", "_").upper()


class EnvironmentDefaults(Env):
    """Takes values that the command line does not set from environment variables. In contrast to the class of cyclopts,
    a command can have its own variables, and arguments without a flag are not read."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        done: set[str] = set()  # a flag in two groups belongs to the first, as on a command line
        for argument in arguments:
            names = [] if argument.children else variables_of(" ".join(commands), argument)
            found = next((name for name in names if name in os.environ and name not in done), None)
            done.update(names)
            if found is not None and not argument.has_tokens:
                for index, value in enumerate(argument._split_env_value(os.environ[found])):
                    argument.append(Token(keyword=found, value=value, source=self.source, index=index))

    def _convert_argument(self, commands: tuple[str, ...], argument: Argument) -> str:
        """Return the variable that help pages show. cyclopts requires a name even for arguments without a variable,
        which are hidden."""
        names = variables_of(" ".join(commands), argument)
        if not names:
            argument.parameter = Parameter.combine(argument.parameter, Parameter(show_env_var=False))
        return names[0] if names else ""
