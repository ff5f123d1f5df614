"""The tree of commands and what their help pages share. A command's module is imported when the command is used.

Each flag is also an environment variable (`bridle.cli.variables`), and an entry of a settings file. The command line
wins over the environment, and that over the file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cyclopts import App, Group, Parameter

from bridle import __version__
from bridle.cli.short_help import PageDefaults, epilogue
from bridle.cli.variables import PREFIX

SERVING = Group("Serve", sort_key=1)
USING = Group("Use a model here", sort_key=2)
ASKING = Group("Ask a running server", sort_key=3)
CONTROL = Group("Steer with controllers", sort_key=4)
KNOWING = Group("Look closer", sort_key=5)
HELP = Group("Help", sort_key=9)

EPILOGUE = """\
MODEL is a folder with a Hugging Face checkpoint, a GGUF file, a hub id such as Qwen/Qwen3-0.6B (owner/name:Q4_K_M for a
GGUF file there), or one of the small models that come with bridle and need no download: `demo`, and `demo-sees` for
images.

Every flag is also an environment variable, `--max-num-seqs 64` is `BRIDLE_MAX_NUM_SEQS=64` (help pages show the names),
and an entry of a YAML file: `bridle --config FILE serve` (or `BRIDLE_CONFIG=FILE`) reads `max-num-seqs: 64` under
`serve:`. The command line wins, then the environment.

`bridle COMMAND --help` shows the flags of a command, `--help-all` also the rare ones. `bridle help WORD` finds commands
and flags by topic. `bridle doctor` checks this machine.
"""


class Command(NamedTuple):
    """A command: its heading, where its function is, what follows its name, and the first line of its help page."""

    group: Group
    name: str
    place: str
    "Module below `bridle.cli`, and function or family of commands, as `module:function`."
    rest: str
    summary: str
    "As in the function's docstring; it is repeated here so that the overview needs no other module."


#: In the order of the overview.
COMMANDS: tuple[Command, ...] = (
    Command(HELP, "help", "help_search:help_", "[WORD...]", "Show a command's help, or find commands and flags by words."),
    Command(SERVING, "serve", "serve:serve", "[MODEL...] [OPTIONS]", "Serve models over HTTP and LMTP."),
    Command(SERVING, "serve-model", "serve_model:serve_model", "[MODEL] [OPTIONS]", "Serve a model to LMQL and other clients of LMTP."),
    Command(SERVING, "shard", "shard:shard", "[MODEL] [OPTIONS]", "Compute a model for a server in another process, over gRPC."),
    Command(USING, "generate", "generate:generate", "[MODEL] PROMPT [OPTIONS]", "Continue a text."),
    Command(USING, "chat", "chat:chat", "[MODEL] [OPTIONS]", "Talk to a model in the terminal."),
    Command(USING, "run-batch", "run_batch:run_batch", "FILE [OPTIONS]", "Answer a file of requests in OpenAI's batch format, without a server."),
    Command(USING, "pull", "models:pull", "NAME [OPTIONS]", "Download a model and print its folder."),
    Command(ASKING, "infer", "control:infer", "PROMPT [OPTIONS]", "Continue a text on a server."),
    Command(ASKING, "lmtp", "lmtp:lmtp", "MODEL [HOST:PORT] [OPTIONS]", "Type prompts to an LMTP server, bridle's or LMQL's."),
    Command(ASKING, "ps", "models:ps", "[OPTIONS]", "List the models and adapters that a running server has loaded or is loading."),
    Command(ASKING, "top", "top:top", "[OPTIONS]", "Watch a server: queue, batch, cache, controllers and requests."),
    Command(CONTROL, "new-controller", "new_controller:new_controller", "NAME [OPTIONS]", "Create a folder with a small controller and its tests."),
    Command(CONTROL, "run", "control:run", "[FILE] [OPTIONS]", "Run a controller on a server and print its text."),
    Command(CONTROL, "upload", "control:upload", "WASM [OPTIONS]", "Upload a controller and print its module id."),
    Command(CONTROL, "tag", "control:tag", "MODULE TAG... [OPTIONS]", "Give names to a controller."),
    Command(CONTROL, "tags", "control:tags", "[OPTIONS]", "List the names of controllers, newest first."),
    Command(CONTROL, "replay", "replay:replay", "TRACE [MODEL] [OPTIONS]", "Run a trace again and compare every token."),
    Command(KNOWING, "explain", "explain:explain", "TRACE [OPTIONS]", "Explain how a traced request got its tokens."),
    Command(KNOWING, "doctor", "doctor:doctor", "[MODEL] [OPTIONS]", "Check this machine for problems and say how to fix them."),
    Command(KNOWING, "check", "check:check", "MODEL [OPTIONS]", "Compare a model with transformers' own computation of it."),
    Command(KNOWING, "quantize", "quantize:quantize", "MODEL OUT [OPTIONS]", "Write a model with weights in fewer bits."),
    Command(KNOWING, "bench", "bench:bench", "NAME [OPTIONS]", "Measure a part of bridle on this machine."),
    Command(USING, "list", "models:list_models", "[OPTIONS]", "List the models on this machine."),
    Command(HELP, "version", "models:version", "[OPTIONS]", "Show the versions of bridle, Python and the backends."),
    Command(CONTROL, "test", "trace_test:check_traces", "[FOLDER] [OPTIONS]", "Test controllers against recorded traces."),
    Command(SERVING, "keys", "keys:app", "", "Make, list, limit and remove API keys."),
    Command(SERVING, "runtime", "runtime:runtime", "[OPTIONS]", "Run the control runtime by itself."),
    Command(ASKING, "adapters", "adapters:app", "", "List, load and unload the LoRA adapters of a running server."),
)  # fmt: skip


def _shown_default(value: object) -> str | None:
    """A default as help pages show it; defaults that mean "nothing" or "off" are left out."""
    if value is None or value is False or value == ():
        return None
    return "yes" if value is True else str(value)


def _tree(*, is_overview: bool = False) -> App:
    """All commands. Those of the overview have a summary, which saves importing them, and no page of their own."""
    tree = App(
        name="bridle",
        help="Serve language models whose generation can be steered, token by token.",
        help_epilogue=EPILOGUE,
        help_format="markdown",
        version=f"bridle {__version__}",
        version_flags=["--version", "-V"],
        config=[PageDefaults(PREFIX)],
        default_parameter=Parameter(show_default=_shown_default),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    tree["--help"].group = HELP
    tree["--version"].group = HELP
    tree.register_install_completion_command(group=HELP, help="Complete commands and flags in this shell from now on.")
    for number, command in enumerate(COMMANDS):
        settings: dict[str, Any] = {"help": command.summary} if is_overview else {}
        if command.rest:
            usage = f"Usage: bridle {command.name} {command.rest}"
            settings |= {"usage": usage, "help_epilogue": epilogue(command.name)}
        if command.name == "runtime":  # which reads its own words
            settings |= {"help_flags": [], "version_flags": []}
        place = f"bridle.cli.{command.place}"
        tree.command(place, name=command.name, group=command.group, sort_key=number, **settings)
    return tree


app = _tree()


def show_overview() -> None:
    """Print the page of the whole program."""
    _tree(is_overview=True)(["--help"], exit_on_error=False)
