"""The tree of commands and what their help pages share.

Each flag is also an environment variable, `--max-num-seqs` is `BRIDLE_MAX_NUM_SEQS`, and an entry of a settings file.
The command line wins over the environment, and that over the file.
"""

from __future__ import annotations

from cyclopts import App, Group
from cyclopts.config import Env

from bridle import __version__
from bridle.cli.adapters import app as adapters
from bridle.cli.bench import bench
from bridle.cli.chat import chat
from bridle.cli.check import check
from bridle.cli.control import infer, run, tag, tags, upload
from bridle.cli.doctor import doctor
from bridle.cli.generate import generate
from bridle.cli.help_search import help_
from bridle.cli.keys import app as keys
from bridle.cli.lmtp import lmtp
from bridle.cli.new_controller import new_controller
from bridle.cli.run_batch import run_batch
from bridle.cli.runtime import replay, runtime
from bridle.cli.serve import serve
from bridle.cli.serve_model import serve_model
from bridle.cli.shard import shard
from bridle.cli.top import top

SERVING = Group("Serve", sort_key=1)
USING = Group("Use a model here", sort_key=2)
CONTROL = Group("Run controllers on a server", sort_key=3)
KNOWING = Group("Look closer", sort_key=4)
HELP = Group("Help", sort_key=9)

EPILOGUE = """\
MODEL is a folder with a Hugging Face checkpoint, a hub id such as Qwen/Qwen3-0.6B, or `demo`, the small model
that comes with bridle and needs no download.

Every flag is also an environment variable, `--max-num-seqs 64` is `BRIDLE_MAX_NUM_SEQS=64`, and an entry of a YAML
file: `bridle --config FILE serve` (or `BRIDLE_CONFIG=FILE`) reads `max-num-seqs: 64` under `serve:`. The command line
wins, then the environment.

`bridle help WORD` finds commands and flags by what they are about; `bridle doctor` looks for what is wrong here.
"""

app = App(
    name="bridle",
    help="Serve language models whose generation can be steered, token by token.",
    help_epilogue=EPILOGUE,
    help_format="markdown",
    version=f"bridle {__version__}",
    version_flags=["--version", "-V"],
    config=[Env("BRIDLE_", command=False)],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app["--help"].group = HELP
app["--version"].group = HELP

app.register_install_completion_command(group=HELP, help="Complete commands and flags in this shell from now on.")

app.command(help_, name="help", group=HELP)

app.command(serve, group=SERVING)
app.command(serve_model, group=SERVING)
app.command(shard, group=SERVING)
app.command(keys)
app["keys"].group = SERVING
app.command(adapters)
app["adapters"].group = SERVING
app.command(runtime, group=SERVING, help_flags=[], version_flags=[])
app.command(generate, group=USING)
app.command(chat, group=USING)
app.command(run_batch, group=USING)
app.command(lmtp, group=USING)
for command in (run, infer, upload, tag, tags):
    app.command(command, group=CONTROL)
app.command(new_controller, group=CONTROL)
app.command(top, group=KNOWING)
app.command(check, group=KNOWING)
app.command(bench, group=KNOWING)
app.command(doctor, group=KNOWING)
app.command(replay, group=KNOWING)
