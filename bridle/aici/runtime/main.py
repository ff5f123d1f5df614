"""The main function of the runtime process: reads options and vocabulary, starts the fork server, then serves or runs
one command.

The order matters: the fork server must be forked after the vocabulary is loaded and before any thread starts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bridle.aici.protocol import Auth
from bridle.aici.runtime import options as o
from bridle.aici.runtime.builtin_controllers import BuiltinControllers
from bridle.aici.runtime.chat_prompt import prepare_chats
from bridle.aici.runtime.compile_cache import Compilers
from bridle.aici.runtime.fork_server import ForkServer, serve, start
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.loaded_module import GuestEnvironment
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.modules import ModuleStore, compiled_folder
from bridle.aici.runtime.parent_watch import ParentWatch
from bridle.aici.runtime.side import SideOptions
from bridle.aici.runtime.storage import SharedVariables
from bridle.aici.runtime.supervisor import RuntimeOptions, Supervisor
from bridle.aici.runtime.tags import is_module_id
from bridle.aici.runtime.vocabulary import RuntimeVocabulary, load_vocabulary
from bridle.aici.shm_channel import MIB, attach_link, remove_names
from bridle.controllers import standard
from bridle.errors import BridleError, InvalidRequest
from bridle.logs import configure_logs_as_told

_log = logging.getLogger(__name__)
_ADMIN = Auth("local", True)
#: Flags of a process that was started by an engine; its log lines belong into the engine's log.
_SERVES = ("--server", "-s", "--nursery")


def main(arguments: Sequence[str] | None = None, parent: int | None = None) -> int:
    """Run the command line. Returns the exit status. With `--server`, the function returns only when the engine has
    ended. The engine is process `parent`, by default the present parent."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_service = any(flag in arguments for flag in _SERVES)
    if is_service:
        configure_logs_as_told("console")
    parser = o.make_parser(is_service=is_service)
    try:
        options = parser.parse_args(arguments)
    except InvalidRequest as error:
        _log.error("%s", error)
        return 2
    lifeline = ParentWatch(parent or os.getppid(), is_piped=options.lifeline, stays=options.stay)
    try:
        return _run(options, parser, arguments, lifeline)
    except (BridleError, OSError) as error:
        if is_service:
            _log.error("%s", error)
        else:
            sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        if options.server and not lifeline.holds():
            remove_names(options.name)


def _run(
    options: argparse.Namespace, parser: argparse.ArgumentParser, arguments: Sequence[str], lifeline: ParentWatch
) -> int:
    if not (options.server or options.module or options.save_tokenizer or options.prepare):
        parser.print_usage(sys.stderr)
        sys.stderr.write("error: one of --server, --module, --prepare and --save-tokenizer is needed\n")
        return 2
    limits = o.limits_of(options)
    needs_tokens = options.server or options.save_tokenizer or options.run
    vocabulary = load_vocabulary(o.tokenizer_of(options), options.logits_size) if needs_tokens else _no_vocabulary()
    if vocabulary.tokenizer is not None:
        vocabulary.tokenizer.chat_settings = o.chat_settings_of(options)
    if options.save_tokenizer:
        Path(options.save_tokenizer).write_bytes(vocabulary.trie(1 if o.dialect_of(options).name != "2" else 2))
        return 0
    if options.server:
        for dialect in (1, 2):
            vocabulary.trie(dialect)  # so that all workers share the trie
        prepare_chats(vocabulary.tokenizer)
    surroundings = GuestEnvironment(
        vocabulary, limits, o.capabilities_of(options), options.wasm_timer_resolution_us * 1000
    )
    gc.collect()
    gc.freeze()  # keeps these objects out of collections, so that their pages stay shared with forked processes
    if options.nursery is not None:
        serve(socket.socket(fileno=options.nursery), surroundings, compiled_folder(o.folder_of(options)))
        return 0
    if options.server:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
    nursery = start(surroundings, arguments, compiled_folder(o.folder_of(options)))
    if options.module:
        return _install(options, limits, nursery, surroundings)
    if not options.server:
        return _prepare(options, limits, nursery)
    if lifeline.await_word():
        _serve(options, limits, nursery, vocabulary, lifeline)
    return 0


def _no_vocabulary() -> RuntimeVocabulary:
    return RuntimeVocabulary([b"\0"], 0, lambda text: [0])


# -- serving -----------------------------------------------------------------------------------------------


def _serve(
    options: argparse.Namespace,
    limits: RuntimeLimits,
    nursery: ForkServer,
    vocabulary: RuntimeVocabulary,
    lifeline: ParentWatch,
) -> None:
    dialect = o.dialect_of(options)
    json_size, bin_size = dialect.defaults
    link = attach_link(
        options.name,
        json_size=(options.json_size or json_size) * MIB,
        mask_size=(options.bin_size or bin_size) * MIB,
        futex=options.futex,
    )
    settings = RuntimeOptions(
        dialect=dialect.name,
        dtype=options.bias_dtype or "f32",
        capabilities=o.capabilities_of(options),
        folder=o.folder_of(options),
        side=SideOptions(options.isolation, options.fork_by, options.restricted),
        allow_downloads=options.allow_downloads and not options.restricted,
        prepared=tuple(standard.manifest()) if options.prepare else (),
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _leave)
    Supervisor(settings, limits, link, lifeline, nursery, vocabulary).run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End this process and all processes that it started. Handles a signal."""
    os._exit(0)


# -- single commands ---------------------------------------------------------------------------------------


def _install(
    options: argparse.Namespace, limits: RuntimeLimits, nursery: ForkServer, surroundings: GuestEnvironment
) -> int:
    store = ModuleStore(o.folder_of(options), limits)
    compilers = Compilers(nursery, store, limits)
    module = str(options.module)
    if not is_module_id(module):
        wasm = Path(module).read_bytes()
        code = None if store.has(store.identify(wasm)) else compilers.compile(wasm)
        module = store.add(wasm, _ADMIN)
        if code is not None:
            compilers.keep(module, code)
    elif not store.has(module):
        raise InvalidRequest(f"unknown module {module}")
    if options.tag:
        store.set_tags(module, options.tag, _ADMIN)
    if options.gh_module:
        store.link(options.gh_module, module)
    sys.stdout.write(f"{module}\n")
    if options.run:
        _run_main(options, compilers, module, surroundings)
    store.close()
    return 0


def _prepare(options: argparse.Namespace, limits: RuntimeLimits, nursery: ForkServer) -> int:
    """Compile the controllers that come with bridle."""
    store = ModuleStore(o.folder_of(options), limits)
    BuiltinControllers(store, Compilers(nursery, store, limits), limits).prepare(standard.manifest())
    store.close()
    return 0


def _run_main(options: argparse.Namespace, compilers: Compilers, module: str, surroundings: GuestEnvironment) -> None:
    """Create an instance with the prompt "Hello world!" and call the module's main function, without an engine."""
    from bridle.aici.runtime.registry import Registry

    compiled = compilers.get(module)
    facts = Registry(surroundings.limits).facts(compiled.facts)
    if facts.problem:
        raise InvalidRequest(facts.problem)
    argument = Path(options.run_arg).read_bytes() if options.run_arg else b'{"steps":[]}'
    program = Sandbox(surroundings.limits).load(str(compiled.path), facts)
    instance = Instance(program, surroundings, argument, SharedVariables(surroundings.limits))
    try:
        instance.create(surroundings.limits.max_init_time)
        prompt = list(surroundings.vocabulary.encode("Hello world!"))
        instance.main(prompt, surroundings.limits.max_call_time)
    finally:
        sys.stdout.write(instance.log.drain())
        sys.stdout.flush()
