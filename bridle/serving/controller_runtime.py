"""The control runtime of a served model: how it starts, and access to its stored modules.

The runtime is a separate process. The runtime starts while the model is loaded, so that it delays nothing. This module
uses neither HTTP nor engines. The optional packages are imported only when a runtime is started.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bridle.aici.protocol import Auth
from bridle.distribution import install_hint
from bridle.errors import BridleError, InvalidRequest, UnsupportedFeature

if TYPE_CHECKING:
    from bridle.aici.client import PolicyPool, RuntimeConfig, RuntimePool
    from bridle.aici.replies import ModuleData, TagsData

_log = logging.getLogger(__name__)

ControlMode = Literal["auto", "on", "off"]
#: The identity for calls of this process, which do not come over a network.
LOCAL_ADMIN = Auth("localhost", True)

#: Arguments for a runtime in a Python program. There is no client that could try again, so the first script waits until
#: the interpreter is compiled.
_PATIENT = ("--limit", "max_prepare_wait=600000")
#: Arguments for the runtime of policies. Policies' instances are limited by the engine's number of requests and
#: outputs. With a lower limit, users could cause a policy to be left out that may be left out when it fails.
_DEMANDED = (
    "--restricted",
    "--wasm-max-forks=65536",
    *(f"--limit={name}=65536" for name in ("max_instances", "max_instances_per_user")),
    "--limit=max_total_forks=1000000000",
    *_PATIENT,
)
#: Timeout of a call on the side channel in seconds, unless the operator raises limits.
_CALL_SECONDS = 900.0
_NEEDED = ("posix_ipc",)
_NEEDED_BY_OUR_RUNTIME = ("wasmtime", "llguidance")


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of a model's control runtime. With mode `auto`, a runtime starts if possible; otherwise the reason is
    logged. With mode `on`, an error is raised if no runtime can be started. `runtime` is the path of a runtime that
    replaces bridle's own. `args` are further arguments for the control runtime, and `dialect` is the runtime's protocol
    version. `trace` is a file in which the messages of both channels are recorded. `store` is the folder of uploaded
    modules (None: a folder in the user's data folder). With `prepare`, the runtime compiles bridle's own controllers
    before a request uses one. `policy_args` are further arguments for the separate runtime that runs Wasm policies."""

    mode: ControlMode = "auto"
    runtime: str | None = None
    args: tuple[str, ...] = ()
    dialect: int = 2
    trace: Path | None = None
    store: Path | None = None
    prepare: bool = False
    policy_args: tuple[str, ...] = ()
    start_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(ControlMode):
            raise InvalidRequest(f"control is {self.mode!r}; must be auto, on or off", "control")
        if self.dialect not in (1, 2):
            raise InvalidRequest(f"aici_dialect is {self.dialect}; must be 1 or 2", "aici_dialect")
        if not self.start_timeout > 0:
            raise InvalidRequest(f"start_timeout is {self.start_timeout}; must be more than 0", "start_timeout")

    def obstacle(self) -> str | None:
        """Return why no runtime can be started on this system; None if one can be started."""
        if sys.platform == "win32":
            return "the control runtime needs POSIX shared memory, which Windows does not have"
        needed = _NEEDED if self.runtime is not None else _NEEDED + _NEEDED_BY_OUR_RUNTIME
        missing = [name for name in needed if find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed; {install_hint('aici')}"
        return None

    def runtime_config(self, tokenizer: Path, num_logits: int | None) -> RuntimeConfig:
        """Return the settings with which the runtime starts for a vocabulary. `num_logits` is the width of the model's
        logits rows."""
        from bridle.aici.client import OWN_RUNTIME, RuntimeConfig

        own = self.runtime is None
        store = ("--store", str(self.store or data_folder() / "controllers")) if own else ()
        prepare = ("--prepare",) if own and self.prepare else ()
        return RuntimeConfig(
            str(tokenizer),
            num_logits=num_logits if own else None,
            command=OWN_RUNTIME if self.runtime is None else (self.runtime,),
            extra_args=(*store, *prepare, *self.args),
            dialect=self.dialect,
            trace=self.trace,
            start_timeout=self.start_timeout,
            call_timeout=_call_timeout(self.args),
        )

    def for_policies(self) -> ControlSettings:
        """Return the settings of the control runtime that runs policies. The policies' runtime is bridle's own runtime
        with separate limits, and uses the same stored modules."""
        args = (*_DEMANDED, *self.policy_args)
        return ControlSettings("on", args=args, store=self.store, start_timeout=self.start_timeout)


def _call_timeout(args: tuple[str, ...]) -> float:
    """Return the timeout of an upload in seconds. The timeout is longer than any compilation that the operator's limits
    allow."""
    allowed = re.findall(r"(?:compile_time|prepare_wait)=(\d+)", " ".join(args))
    return max([_CALL_SECONDS, *(2 * int(milliseconds) / 1000 for milliseconds in allowed)])


def as_control(value: ControlSettings | bool | None) -> ControlSettings:
    """Return the settings for a value in the Python API: a settings object, True for `on`, or False or None for
    `off`."""
    if isinstance(value, ControlSettings):
        return value
    if value is None or isinstance(value, bool):
        return ControlSettings("on", args=_PATIENT) if value else ControlSettings("off")
    raise InvalidRequest(f"control is {value!r}; must be True, False or an object of ControlSettings", "control")


def data_folder() -> Path:
    """Return the folder of this user in which bridle keeps files between processes."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "bridle"


def demanded_pool(settings: ControlSettings, tokenizer: Path, num_logits: int) -> PolicyPool | None:
    """Return the pool of Wasm policies; None if no runtime can be started. The runtime of the pool starts when it is
    first needed."""
    own = settings.for_policies()
    if own.obstacle() is not None:
        return None
    from bridle.aici.client import PolicyPool, RuntimePool

    return PolicyPool(lambda: RuntimePool(own.runtime_config(tokenizer, num_logits), num_logits))


class ControlStart:
    """A runtime that a thread is starting. Get the runtime with `result`, or end it with `abandon`."""

    def __init__(self, settings: ControlSettings, tokenizer: Path, num_logits: int | None) -> None:
        self._settings, self._tokenizer, self._num_logits = settings, tokenizer, num_logits
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="bridle-control-start")
        self._future = None if num_logits is None else self._threads.submit(self._start, num_logits)

    def _start(self, num_logits: int) -> RuntimePool:
        from bridle.aici.client import RuntimePool

        return RuntimePool(self._settings.runtime_config(self._tokenizer, num_logits), num_logits)

    def result(self, num_logits: int) -> RuntimePool:
        """Wait for the runtime and return it. `num_logits` is the width of the model's logits rows. Raises the error of
        a failed start."""
        try:
            if self._future is None or num_logits != self._num_logits:
                self.abandon()
                return self._start(num_logits)
            return self._future.result()
        finally:
            self._threads.shutdown(wait=False)

    def abandon(self) -> None:
        """End the runtime, or stop its start."""
        future, self._future = self._future, None
        if future is not None and future.exception() is None:
            future.result().shutdown()
        self._threads.shutdown(wait=False)


def begin_control(settings: ControlSettings, tokenizer: Path, num_logits: int | None) -> ControlStart | None:
    """Start a runtime in the background. Returns None if the settings turn the runtime off, or if it cannot be started.

    `num_logits` is an estimate of the logits' width. If `num_logits` is None, the start waits for the real width of the
    logits. Raises `UnsupportedFeature` if the settings require a runtime and it cannot be started.
    """
    if settings.mode == "off":
        return None
    obstacle = settings.obstacle()
    if obstacle is None:
        return ControlStart(settings, tokenizer, num_logits)
    if settings.mode == "on":
        raise UnsupportedFeature(f"no control runtime can be started: {obstacle}", "control")
    _log.warning("controllers are off: %s", obstacle)
    return None


def finish_control(settings: ControlSettings, start: ControlStart | None, num_logits: int) -> RuntimePool | None:
    """Wait for the runtime that was started. A runtime that fails to start is an error only if the settings require
    one."""
    if start is None:
        return None
    try:
        return start.result(num_logits)
    except (BridleError, OSError) as error:
        if settings.mode == "on":
            raise
        _log.warning("controllers are off: %s", error)
        return None


def guess_num_logits(folder: Path) -> int | None:
    """Return the width of a model's logits rows according to its configuration, or None."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config") or {}) if isinstance(config, dict) else ():
        if isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


# -- the store of modules ------------------------------------------------------------------------------------


def upload_module(control: RuntimePool, wasm: bytes, auth: Auth) -> ModuleData:
    """Compile a controller and store it. Raises `InvalidRequest` if `wasm` is not a controller. The call blocks; a
    large controller takes seconds."""
    from bridle.aici import protocol, replies

    message = protocol.MkModule(binary=base64.b64encode(wasm).decode(), auth=_as_json(auth))
    return control.call(message, replies.ModuleData)


def tag_module(control: RuntimePool, module: str, tags: Sequence[str], auth: Auth) -> TagsData:
    """Set tags as further names of a module. Raises `InvalidRequest` for an invalid name, or for a tag that `auth` may
    not set. Blocks."""
    from bridle.aici import protocol, replies

    message = protocol.SetTags(module_id=module, tags=list(tags), auth=_as_json(auth))
    return control.call(message, replies.TagsData)


def find_module(control: RuntimePool, name: str) -> str | None:
    """Return the hash of the module for `name`, which is a hash or a tag. Returns "" if there is no such module, and
    None if the runtime cannot answer. Blocks."""
    from bridle.aici import protocol, replies

    if not control.knows("get_module"):
        return None
    try:
        return control.call(protocol.GetModule(module_id=name), replies.ModuleData).module_id
    except InvalidRequest:
        return ""


def list_tags(control: RuntimePool, auth: Auth) -> TagsData:
    """Return all tags, the newest first. Blocks."""
    from bridle.aici import protocol, replies

    return control.call(protocol.GetTags(auth=_as_json(auth)), replies.TagsData)


def _as_json(auth: Auth) -> dict[str, Any]:
    return {"user": auth.user, "is_admin": auth.is_admin}
