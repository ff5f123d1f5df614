"""A control runtime as a child process: start, handshake, detection of its end, cleanup.

The engine's side creates all shared objects under a fresh prefix, and removes their names after the runtime's first
answer. Without names, the objects live as long as the two processes. Any runtime with the command line of the original
AICI runtime works, as bridle's own does. Bridle's runtime is started before the objects are created, so that it can
remove their names if this process is killed. This process holds the runtime's standard input, through which the runtime
learns that all objects exist, and that this process has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from bridle import __version__
from bridle.aici import protocol, replies
from bridle.aici.client.recording import TraceWriter
from bridle.aici.shm_channel import MIB, SharedChannels, create_link, remove_names
from bridle.errors import ControllerError, ProtocolError
from bridle.logs import log_variables
from bridle.traces import TraceHeader

T = TypeVar("T")

#: Command line of bridle's own runtime.
OWN_RUNTIME = (sys.executable, "-m", "bridle.aici.runtime")


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Settings for starting a runtime. Sizes in MiB, times in seconds.

    `tokenizer` is a folder or a `tokenizer.json`; `num_logits` pads its vocabulary to the model's number of logits.
    `dialect` is 1 for the original AICI runtime, which has neither capabilities nor mask types, and 2 for others.
    `trace` is a file to which a trace of both channels is appended. `call_timeout` limits a call on the side channel,
    such as an upload with its compilation; the default exceeds the runtime's own limits.
    """

    tokenizer: str
    num_logits: int | None = None
    command: tuple[str, ...] = OWN_RUNTIME
    extra_args: tuple[str, ...] = ()
    dialect: int = 2
    futex: bool = False
    json_size: int = 128
    mask_size: int = 64
    trace: Path | None = None
    start_timeout: float = 60.0
    call_timeout: float = 900.0

    @property
    def is_ours(self) -> bool:
        """Return whether the command is bridle's own runtime."""
        return self.command == OWN_RUNTIME

    def arguments(self, prefix: str) -> list[str]:
        """Return the runtime's command-line arguments. `prefix` begins the names of the shared objects."""
        args = [*self.command, "--server", "--name", prefix, "--tokenizer", self.tokenizer]
        args += ["--json-size", str(self.json_size), "--bin-size", str(self.mask_size)]
        if self.is_ours:
            args.append("--lifeline")
        if self.futex:
            args.append("--futex")
        if self.dialect == 2:
            args += ["--cap-fork", "--cap-backtrack", "--cap-ff-tokens", "--bias-dtype", "bool"]
            if self.num_logits is not None:
                args += ["--logits-size", str(self.num_logits)]
        return [*args, *self.extra_args]


class RuntimeProcess:
    """One running runtime process with its channels. `extensions` are the protocol extensions that the runtime
    announced. `vocab_size` is the runtime's vocabulary size."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.prefix = f"/bridle-{os.getpid()}-{secrets.token_hex(4)}-"
        self._trace = TraceWriter(config.trace, self._header()) if config.trace is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = self._is_linked = False
        try:
            if config.is_ours:
                self._process = self._spawn()
                self.link = self._create_link()
                self._tell_all_is_there(self._process)
            else:
                self.link = self._create_link()
                self._process = self._spawn()
            self.vocab_size, self.extensions = self._shake_hands()
        except BaseException:
            self.kill()
            self.close()
            raise
        finally:
            remove_names(self.prefix)

    def _header(self) -> TraceHeader:
        """Return the header record with which a trace of this runtime begins."""
        config = self.config
        started = {"dialect": config.dialect, "num_logits": config.num_logits, "is_ours": config.is_ours}
        made = datetime.now(UTC).isoformat(timespec="milliseconds")
        name = f"runtime-{self.prefix.strip('/-')}"
        return TraceHeader(name, model=config.tokenizer, runtime=started, bridle=__version__, made=made)

    def _create_link(self) -> SharedChannels:
        sizes = self.config.json_size * MIB, self.config.mask_size * MIB
        link = create_link(self.prefix, json_size=sizes[0], mask_size=sizes[1], futex=self.config.futex)
        self._is_linked = True
        return link

    def _tell_all_is_there(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: the first exchange reports it
            process.stdin.write(b"\n")
            process.stdin.flush()

    def _spawn(self) -> subprocess.Popen[bytes]:
        stdin = subprocess.PIPE if self.config.is_ours else subprocess.DEVNULL
        try:
            return subprocess.Popen(  # noqa: S603 -- the operator's own command
                self.config.arguments(self.prefix),
                stdin=stdin,
                env=os.environ | log_variables(),
                start_new_session=True,
            )
        except OSError as error:
            command = self.config.command[0]
            raise ControllerError(f"the control runtime {command!r} cannot be started: {error}") from None

    def _shake_hands(self) -> tuple[int, frozenset[str]]:
        self._call(protocol.Ping(), replies.Pong)
        tokens = self._call(protocol.Tokens(), replies.TokensData)
        extensions = tokens.extensions
        return tokens.vocab_size, frozenset(extensions if isinstance(extensions, list) else ())

    def _call(self, request: protocol.Message, data_type: type[T]) -> T:
        """Send a request on the main channel and return its reply, before the engine uses the channel."""
        timeout = self.config.start_timeout
        try:
            self.send(protocol.encode(request), timeout=timeout)
            reply = self.receive(timeout)
        except ProtocolError as error:
            raise ControllerError(f"the control runtime ended while it started ({self._status()}): {error}") from None
        if reply is None:
            raise ControllerError(f"the control runtime did not answer within {timeout:g} s after its start")
        message = replies.decode_reply(reply, data_type)
        if not isinstance(message, replies.Ok):
            raise ControllerError(f"the control runtime refused to start: {message.error}")
        data: T = message.data
        return data

    def _status(self) -> str:
        status = self._process.poll() if self._process is not None else None
        return f"exit status {status}, command {' '.join(self.config.arguments(self.prefix))}"

    # -- both channels, with recording -------------------------------------------------------------------

    def send(self, message: bytes, *, side: bool = False, timeout: float = 10.0) -> None:
        """Send a request. Raises `ProtocolError` if the runtime has ended or does not read the request."""
        if self._trace is not None:
            self._trace.sent(message, side=side)
        (self.link.side if side else self.link.main).send(message, timeout, self.is_alive)

    def receive(self, timeout: float | None, *, side: bool = False) -> bytes | None:
        """Receive the next reply; None if none came within `timeout` seconds. Raises `ProtocolError`."""
        reply = (self.link.side if side else self.link.main).receive(timeout, self.is_alive)
        if reply is not None and self._trace is not None:
            self._trace.received(reply, side=side)
        return reply

    @property
    def pid(self) -> int:
        """The runtime's process id, which is also the id of the process group of all processes that the runtime
        started."""
        return self._process.pid if self._process is not None else -1

    def is_alive(self) -> bool:
        """Return whether the process runs, as every wait for a reply checks."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End the runtime and all processes that it started. Idempotent; may be called from any thread."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close the channels and the trace. No thread may be waiting in a channel. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._trace is not None:
                self._trace.close()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            if self._is_linked:
                self.link.close()
