"""The list of commands and the common parts of their help pages. A command's module is imported only when the command
is used.

Each flag can also be set by an environment variable (`bridle.cli.variables`) or by an entry of a settings file. The
command line has precedence over the environment, and the environment over the file.
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
MODEL is a folder with a Hugging Face checkpoint, a GGUF file, a short name that `bridle pull` lists such as smollm2, a
hub id such as Qwen/Qwen3-0.6B (owner/name:Q4_K_M for a GGUF file there), or one of the toy models that come with bridle
and need no download: `demo`, and `demo-sees` for images.

Every flag is also an environment variable, `--max-num-seqs 64` is `BRIDLE_MAX_NUM_SEQS=64` (help pages show the names),
and an entry of a YAML file: `bridle --config FILE serve` (or `BRIDLE_CONFIG=FILE`) reads `max-num-seqs: 64` under
`serve:`. The command line wins, then the environment.

`bridle COMMAND --help` shows the flags of a command, `--help-all` also the rare ones. `bridle help WORD` finds commands
and flags by topic. `bridle doctor` checks this machine.
"""


class Command(NamedTuple):
    """A command: group in the overview, name, function, arguments, and first line of the help page."""

    group: Group
    name: str
    place: str
    """The function or group of commands, as `module:name` below `bridle.cli`. Without `:name`, the function has the
    command's name."""
    rest: str | None
    "Arguments in the usage line. None for a group, whose own help lists its commands."
    summary: str
    """The first line of the function's docstring. It is repeated here so that the overview imports no module of a
    command."""

    @property
    def target(self) -> str:
        """Return the import path of the command's function, in the format of cyclopts."""
        module, _, name = self.place.partition(":")
        return f"bridle.cli.{module}:{name or self.name.replace('-', '_')}"


#: The commands, in the order of the overview.
_ROWS: tuple[tuple[Group, str, str, str | None, str], ...] = (
    (HELP, "help", "help_search:help_", "[WORD...]", "Show a command's help, or find commands and flags by words."),
    (SERVING, "serve", "serve", "[MODEL...]", "Serve models over HTTP and LMTP."),
    (SERVING, "serve-model", "serve_model", "[MODEL]", "Serve a model to LMQL and other clients of LMTP."),
    (SERVING, "shard", "shard", "[MODEL]", "Compute a model for a server in another process, over gRPC."),
    (USING, "generate", "generate", "[MODEL] PROMPT", "Continue a text."),
    (USING, "chat", "chat", "[MODEL]", "Talk to a model in the terminal."),
    (USING, "run-batch", "run_batch", "FILE", "Answer a file of requests in OpenAI's batch format, without a server."),
    (USING, "pull", "models", "[NAME]", "Download a model and print its folder."),
    (USING, "show", "model_files", "NAME", "Show the properties of a model on this machine, without loading it."),
    (USING, "rm", "model_files", "NAME", "Delete a model from this machine."),
    (ASKING, "infer", "control", "PROMPT", "Continue a text on a server."),
    (ASKING, "lmtp", "lmtp", "MODEL [HOST:PORT]", "Type prompts to an LMTP server, bridle's or LMQL's."),
    (ASKING, "ps", "models", "", "List the models and adapters that a running server has loaded or is loading."),
    (ASKING, "top", "top", "", "Watch a server: queue, batch, cache, controllers and requests."),
    (CONTROL, "new-controller", "new_controller", "NAME", "Create a folder with a small controller and its tests."),
    (CONTROL, "run", "control", "[FILE]", "Run a controller on a server and print its text."),
    (CONTROL, "upload", "control", "WASM", "Upload a controller and print its module id."),
    (CONTROL, "tag", "control", "MODULE TAG...", "Give names to a controller."),
    (CONTROL, "tags", "control", "", "List the names of controllers, newest first."),
    (CONTROL, "replay", "replay", "TRACE [MODEL]", "Run a trace again and compare every token."),
    (KNOWING, "explain", "explain", "TRACE", "Explain how a traced request got its tokens."),
    (KNOWING, "doctor", "doctor", "[MODEL]", "Check this machine for problems and say how to fix them."),
    (KNOWING, "check", "check", "MODEL", "Compare a model with transformers' own computation of it."),
    (KNOWING, "detect", "detect", "FILE", "Test a text for the watermark that a policy writes."),
    (KNOWING, "quantize", "quantize", "MODEL OUT", "Write a model with weights in fewer bits."),
    (KNOWING, "make-vector", "make_vector", "MODEL PAIRS OUT", "Write a control vector made of pairs of prompts."),
    (KNOWING, "bench", "bench", "NAME", "Measure a part of bridle on this machine."),
    (USING, "list", "models:list_models", "", "List the models on this machine."),
    (HELP, "version", "models", "", "Show the versions of bridle, Python and the backends."),
    (CONTROL, "test", "trace_test:check_traces", "[FOLDER]", "Test controllers against recorded traces."),
    (SERVING, "keys", "keys:app", None, "Make, list, limit and remove API keys."),
    (SERVING, "runtime", "runtime", "", "Run the control runtime by itself."),
    (KNOWING, "cache", "cache:app", None, "List and clear the cached files of models and prompts."),
    (ASKING, "adapters", "adapters:app", None, "List, load and unload the LoRA adapters of a running server."),
)
COMMANDS = tuple(Command(*row) for row in _ROWS)


def _shown_default(value: object) -> str | None:
    """Return a flag's default as help pages show it; None for defaults that mean "nothing" or "off"."""
    if value is None or value is False or value == ():
        return None
    return "yes" if value is True else str(value)


def _tree(*, is_overview: bool = False) -> App:
    """Return the tree of all commands. If `is_overview`, commands have only a summary, so that their modules are not
    imported."""
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
        if command.rest is not None:
            usage = " ".join(["Usage: bridle", command.name, *command.rest.split(), "[OPTIONS]"])
            settings |= {"usage": usage, "help_epilogue": epilogue(command.name)}
        if command.name == "runtime":  # this command parses its own arguments
            settings |= {"help_flags": [], "version_flags": []}
        tree.command(command.target, name=command.name, group=command.group, sort_key=number, **settings)
    return tree


app = _tree()


def show_overview() -> None:
    """Print the help page of the whole program."""
    _tree(is_overview=True)(["--help"], exit_on_error=False)
