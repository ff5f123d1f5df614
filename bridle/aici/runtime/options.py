"""The runtime's command line: options of the original AICI runtime and bridle's own."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from bridle.aici.masks import DTYPES
from bridle.aici.runtime.limits import DEFAULT_LIMITS, MIB, RuntimeLimits
from bridle.compat.suggestions import closest
from bridle.errors import InvalidRequest
from bridle.tokenizer.chat_settings import ChatSettings

#: Short tokenizer names of the original runtime, with their names on the hub.
TOKENIZERS = {
    "gpt4": "Xenova/gpt-4",
    "llama70": "codellama/CodeLlama-70b-Instruct-hf",
    "llama16": "codellama/CodeLlama-13b-Instruct-hf",
    "llama": "codellama/CodeLlama-34b-Instruct-hf",
    "orca": "microsoft/Orca-2-13b@refs/pr/23",
    "falcon": "tiiuae/falcon-7b",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.2",
    "mpt": "mosaicml/mpt-7b",
    "phi": "microsoft/phi-1_5",
    "gpt2": "gpt2",
}
#: Options that only engines of dialect 2 pass. If one is present, the dialect is 2.
_DIALECT_2 = ("cap_fork", "cap_backtrack", "cap_ff_tokens", "bias_dtype", "logits_size", "restricted")
_STEP_TIME_1 = 150


@dataclass(frozen=True, slots=True)
class ProtocolDialect:
    """The protocol dialect of an engine. `name` is 1, 1b or 2."""

    name: str

    @property
    def defaults(self) -> tuple[int, int]:
        """Return the default sizes of a message region and of the bias region, in MiB."""
        return (128, 64) if self.name == "2" else (8, 16)


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the right name for a misspelled option."""

    def error(self, message: str) -> NoReturn:
        flag = message.removeprefix("unrecognized arguments: ").split()[0]
        meant = closest(flag, self._option_string_actions) if flag in message.split()[2:] else None
        super().error(message + ("" if meant is None else f"; did you mean {meant}?"))


class _ServiceParser(_Parser):
    """A parser that raises `InvalidRequest` for a mistake instead of printing usage lines, which do not belong in a
    log."""

    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(
            f"the control runtime cannot start: {message}; check --aici-rtarg (`bridle runtime --help` lists its "
            "values)"
        )


def make_parser(*, is_service: bool = False) -> argparse.ArgumentParser:
    """Return a parser with all options. The options' help texts are the reference of `bridle runtime`. `is_service`
    means that an engine starts the runtime, not a person."""
    parser = (_ServiceParser if is_service else _Parser)(
        prog="bridle runtime", description="Host sandboxed controllers for an engine, over shared memory."
    )
    _add_serving(parser)
    _add_limits(parser)
    _add_capabilities(parser)
    _add_modules(parser)
    _add_own(parser)
    return parser


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("-s", "--server", action="store_true", help="serve over shared memory")
    group.add_argument("-n", "--name", default="/aici0-", metavar="PREFIX", help="prefix of object names")
    group.add_argument("-t", "--tokenizer", default="llama", help="short name, hub id[@revision], or a path")
    group.add_argument("--json-size", type=int, metavar="MB", help="size of each message region")
    group.add_argument("--bin-size", type=int, metavar="MB", help="size of the bias region")
    group.add_argument(
        "--busy-wait-time", type=int, default=200, metavar="MS", help="accepted; waiting never spins here"
    )
    group.add_argument("--futex", action="store_true", help="synchronize by futex instead of semaphores")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument("--wasm-max-forks", type=int, metavar="N")
    group.add_argument("--wasm-max-memory", type=int, metavar="MB")
    group.add_argument("--wasm-max-pre-step-time", type=int, metavar="MS")
    group.add_argument("--wasm-max-step-time", type=int, metavar="MS")
    group.add_argument("--wasm-max-init-time", type=int, metavar="MS")
    group.add_argument("--wasm-max-timeout-steps", type=int, metavar="N")
    group.add_argument("--wasm-timer-resolution-us", type=int, default=0, metavar="US")
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help="any other limit: " + ", ".join(field.name for field in fields(RuntimeLimits)),
    )


def _add_capabilities(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the engine can do")
    group.add_argument("--cap-fork", action="store_true")
    group.add_argument("--cap-backtrack", action="store_true")
    group.add_argument("--cap-ff-tokens", action="store_true")
    group.add_argument("--bias-dtype", choices=sorted(DTYPES), help="type of bias rows; f32 if not given")
    group.add_argument("--logits-size", type=int, metavar="N", help="pad the vocabulary to N tokens")


def _add_modules(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("modules")
    group.add_argument("-m", "--module", metavar="FILE", help="install a .wasm file, print its id, exit")
    group.add_argument("--tag", action="append", default=[], help="with --module: tag it")
    group.add_argument("--gh-module", metavar="REF", help="with --module: let this gh: reference mean it")
    group.add_argument("-r", "--run", action="store_true", help="with --module: instantiate and run its main")
    group.add_argument("--run-arg", metavar="FILE", help="argument for --run")
    group.add_argument("--restricted", action="store_true", help="no uploads, no tagging, no downloads")
    group.add_argument("--save-tokenizer", metavar="FILE", help="write the token trie, exit")
    group.add_argument("--bench", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--fork", action="store_true", help=argparse.SUPPRESS)


def _add_own(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("additions of bridle")
    group.add_argument("--dialect", choices=("auto", "1", "1b", "2"), default="auto", help="what the engine speaks")
    group.add_argument("--store", type=Path, metavar="FOLDER", help="where modules and compiled code are kept")
    group.add_argument(
        "--isolation", choices=("tenant", "request"), default="tenant", help="who shares a worker process"
    )
    group.add_argument("--fork-by", choices=("copy", "process"), default="copy", help="how an instance is forked")
    group.add_argument("--allow-downloads", action="store_true", help="fetch gh: controllers that are not installed")
    group.add_argument(
        "--prepare",
        action="store_true",
        help="compile the controllers that come with bridle: in the background with --server, else at once, and exit",
    )
    group.add_argument(
        "--tool-prompt",
        choices=("describe", "refuse"),
        default="describe",
        help="tools in conversations of scripts that the model's chat template does not write",
    )
    group.add_argument(
        "--parse-special-text",
        action="store_true",
        help="special tokens that are spelled in conversations of scripts become these tokens",
    )
    group.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    group.add_argument(
        "--lifeline",
        action="store_true",
        help="the engine holds our standard input open while it lives, and writes a byte once it has made everything",
    )
    group.add_argument("--stay", action="store_true", help="go on when the parent process ends")


def dialect_of(options: argparse.Namespace) -> ProtocolDialect:
    """Return the engine's dialect, which follows from the command line."""
    if options.dialect != "auto":
        return ProtocolDialect(options.dialect)
    return ProtocolDialect("2" if any(getattr(options, name) for name in _DIALECT_2) else "1")


def chat_settings_of(options: argparse.Namespace) -> ChatSettings:
    """Return the chat settings for conversations that guests render."""
    return ChatSettings(parse_special_text=options.parse_special_text, tool_prompt=options.tool_prompt)


def limits_of(options: argparse.Namespace) -> RuntimeLimits:
    """Return the limits with the command line's changes. Raises `InvalidRequest`."""
    names = {
        "wasm_max_forks": "max_forks",
        "wasm_max_pre_step_time": "max_pre_step_time",
        "wasm_max_step_time": "max_step_time",
        "wasm_max_init_time": "max_init_time",
        "wasm_max_timeout_steps": "max_timeout_steps",
    }
    changes: dict[str, int] = {}
    if dialect_of(options).name != "2":
        changes["max_step_time"] = _STEP_TIME_1
    for option, name in names.items():
        if getattr(options, option) is not None:
            changes[name] = getattr(options, option)
    if options.wasm_max_memory is not None:
        changes["max_memory"] = options.wasm_max_memory * MIB
    for text in options.limit:
        name, _, value = text.partition("=")
        if name not in DEFAULT_LIMITS.__dataclass_fields__ or not value.isdigit():
            raise InvalidRequest(f"--limit is {text!r}; must be NAME=N with a NAME that --help lists", "limit")
        changes[name] = int(value)
    return replace(DEFAULT_LIMITS, **changes)


def capabilities_of(options: argparse.Namespace) -> frozenset[str]:
    """Return the names of the engine's capabilities. An engine of dialect 1 has all capabilities except
    `when_sampled`."""
    if dialect_of(options).name != "2":
        return frozenset({"fork", "backtrack", "ff_tokens"})
    flags = {
        "fork": options.cap_fork,
        "backtrack": options.cap_backtrack,
        "ff_tokens": options.cap_ff_tokens,
        "when_sampled": options.cap_ff_tokens,
    }
    return frozenset(name for name, flag in flags.items() if flag)


def folder_of(options: argparse.Namespace) -> Path:
    """Return the folder of the module store: `--store`, or a folder of the user that runs this process."""
    if options.store is not None:
        return Path(options.store)
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "bridle" / "controllers"


def tokenizer_of(options: argparse.Namespace) -> str:
    """Return the path or hub id of the tokenizer. A name without '/' must be a known short name. Raises
    `InvalidRequest`."""
    name = str(options.tokenizer)
    if name in TOKENIZERS:
        return TOKENIZERS[name]
    if "/" in name or name.startswith(".") or Path(name).exists():
        return name
    raise InvalidRequest(
        f"unknown tokenizer {name!r}; must be {', '.join(TOKENIZERS)}, a hub id user/model[@revision], or a path",
        "tokenizer",
    )
