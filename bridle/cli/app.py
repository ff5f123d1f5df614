"""The tree of commands and what their help pages share.

Each flag is also an environment variable (`bridle.cli.variables`), and an entry of a settings file. The command line
wins over the environment, and that over the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cyclopts import App, Group, Parameter

from bridle import __version__
from bridle.cli.adapters import app as adapters
from bridle.cli.bench import bench
from bridle.cli.chat import chat
from bridle.cli.check import check
from bridle.cli.control import infer, run, tag, tags, upload
from bridle.cli.doctor import doctor
from bridle.cli.explain import explain
from bridle.cli.generate import generate
from bridle.cli.help_search import help_
from bridle.cli.keys import app as keys
from bridle.cli.lmtp import lmtp
from bridle.cli.models import list_models, ps, pull, version
from bridle.cli.new_controller import new_controller
from bridle.cli.quantize import quantize
from bridle.cli.replay import replay
from bridle.cli.run_batch import run_batch
from bridle.cli.runtime import runtime
from bridle.cli.serve import serve
from bridle.cli.serve_model import serve_model
from bridle.cli.shard import shard
from bridle.cli.top import top
from bridle.cli.trace_test import check_traces
from bridle.cli.variables import PREFIX, EnvironmentDefaults

SERVING = Group("Serve", sort_key=1)
USING = Group("Use a model here", sort_key=2)
ASKING = Group("Ask a running server", sort_key=3)
CONTROL = Group("Steer with controllers", sort_key=4)
KNOWING = Group("Look closer", sort_key=5)
HELP = Group("Help", sort_key=9)

EPILOGUE = """\
MODEL is a folder with a Hugging Face checkpoint, a GGUF file, a hub id such as Qwen/Qwen3-0.6B (owner/name:Q4_K_M for a
GGUF file there), or one of the small models that come with bridle and need no download: `demo`, and `demo-sees` for
pictures.

Every flag is also an environment variable, `--max-num-seqs 64` is `BRIDLE_MAX_NUM_SEQS=64` (help pages show the names),
and an entry of a YAML file: `bridle --config FILE serve` (or `BRIDLE_CONFIG=FILE`) reads `max-num-seqs: 64` under
`serve:`. The command line wins, then the environment.

`bridle help WORD` finds commands and flags by what they are about; `bridle doctor` looks for what is wrong here.
"""
#: What the page of a single command ends with.
SHORT_EPILOGUE = "Flags may also be environment variables or entries of a settings file; `bridle --help` says how."


def _shown_default(value: object) -> str | None:
    """A default as help pages show it; defaults that mean "nothing" or "off" are left out."""
    if value is None or value is False or value == ():
        return None
    return "yes" if value is True else str(value)


app = App(
    name="bridle",
    help="Serve language models whose generation can be steered, token by token.",
    help_epilogue=EPILOGUE,
    help_format="markdown",
    version=f"bridle {__version__}",
    version_flags=["--version", "-V"],
    config=[EnvironmentDefaults(PREFIX)],
    default_parameter=Parameter(show_default=_shown_default),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app["--help"].group = HELP
app["--version"].group = HELP

app.register_install_completion_command(group=HELP, help="Complete commands and flags in this shell from now on.")

#: Each command with what follows its name on a command line, under its heading, in the order of the help page.
COMMANDS: tuple[tuple[Group, Callable[..., int], str], ...] = (
    (SERVING, serve, "[MODEL...] [OPTIONS]"),
    (SERVING, serve_model, "[MODEL] [OPTIONS]"),
    (SERVING, shard, "[MODEL] [OPTIONS]"),
    (USING, generate, "[MODEL] PROMPT [OPTIONS]"),
    (USING, chat, "[MODEL] [OPTIONS]"),
    (USING, run_batch, "FILE [OPTIONS]"),
    (USING, pull, "NAME [OPTIONS]"),
    (ASKING, infer, "PROMPT [OPTIONS]"),
    (ASKING, lmtp, "MODEL [HOST:PORT] [OPTIONS]"),
    (ASKING, ps, "[OPTIONS]"),
    (ASKING, top, "[OPTIONS]"),
    (CONTROL, new_controller, "NAME [OPTIONS]"),
    (CONTROL, run, "[FILE] [OPTIONS]"),
    (CONTROL, upload, "WASM [OPTIONS]"),
    (CONTROL, tag, "MODULE TAG... [OPTIONS]"),
    (CONTROL, tags, "[OPTIONS]"),
    (CONTROL, replay, "TRACE [MODEL] [OPTIONS]"),
    (KNOWING, explain, "TRACE [OPTIONS]"),
    (KNOWING, doctor, "[MODEL] [OPTIONS]"),
    (KNOWING, check, "MODEL [OPTIONS]"),
    (KNOWING, quantize, "MODEL OUT [OPTIONS]"),
    (KNOWING, bench, "NAME [OPTIONS]"),
)


def _add(group: Group, command: Callable[..., int], rest: str, **settings: Any) -> None:
    """A command under a heading."""
    name = settings.pop("name", command.__name__.replace("_", "-"))
    usage = f"Usage: bridle {name} {rest}"
    app.command(
        command, name=name, group=group, usage=usage, sort_key=len(list(app)), help_epilogue=SHORT_EPILOGUE, **settings
    )


def _add_family(group: Group, family: App) -> None:
    """Commands with a common first word."""
    family.group, family.sort_key, family.help_epilogue = group, len(list(app)), SHORT_EPILOGUE
    app.command(family)


_add(HELP, help_, "[WORD...]", name="help")
for row in COMMANDS:
    _add(*row)
_add(USING, list_models, "[OPTIONS]", name="list")
_add(HELP, version, "[OPTIONS]")
_add(CONTROL, check_traces, "[FOLDER] [OPTIONS]", name="test")
_add_family(SERVING, keys)
_add(SERVING, runtime, "[OPTIONS]", help_flags=[], version_flags=[])
_add_family(ASKING, adapters)
