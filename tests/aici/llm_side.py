"""A minimal engine side of the AICI runtime protocol, written from the specification without any code of bridle.

It creates the shared objects, starts a runtime, uses both channels, and checks raw bytes.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import math
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc

from tests.waiting import PATIENCE, until

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class RuntimeDied(Exception):
    """Raised if the runtime's process has ended."""


class Llm:
    """An engine that creates the shared objects and starts the runtime. `close` cleans up after any error."""

    def __init__(
        self,
        tokenizer: Path,
        store: Path,
        *args: str,
        futex: bool = False,
        json_size: int = 1,
        bin_size: int = 1,
        command: tuple[str, ...] = (sys.executable, "-m", "bridle.aici.runtime"),
    ) -> None:
        self.prefix = f"/bt-{os.getpid()}-{uuid.uuid4().hex[:8]}-"  # what a killed test leaves is swept by it
        self.futex = futex
        self.json_size, self.bin_size = json_size * MIB, bin_size * MIB
        self._maps: dict[str, mmap.mmap] = {}
        self._semaphores: dict[str, posix_ipc.Semaphore] = {}
        self._stray: dict[str, dict[str, Any]] = {}
        self._create()
        options = ["--tokenizer", str(tokenizer), "--name", self.prefix, "--server"]
        options += ["--json-size", str(json_size), "--bin-size", str(bin_size)]
        options += ["--store", str(store)] if "bridle.aici.runtime" in command[-1] else []
        options += ["--futex"] if futex else []
        self.process = subprocess.Popen([*command, *options, *args], start_new_session=True)

    # -- shared objects ------------------------------------------------------------------------------------

    def _create(self) -> None:
        for name in ("cmd", "resp", "cmd-side", "resp-side"):
            region = self.prefix + name + ("" if self.futex else "-shm")
            self._maps[name] = self._region(region, self.json_size)
            if not self.futex:
                for end, value in (("-wr", 1), ("-rd", 0)):
                    full = self.prefix + name + end
                    self._semaphores[name + end] = posix_ipc.Semaphore(full, posix_ipc.O_CREX, initial_value=value)
        self.bin = self._region(self.prefix + "bin-shm", self.bin_size)

    def _region(self, name: str, size: int) -> mmap.mmap:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=size)
        mapped = mmap.mmap(memory.fd, size)
        memory.close_fd()
        return mapped

    def unlink(self) -> None:
        for name in os.listdir("/dev/shm"):
            if self.prefix[1:] in name:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"/dev/shm/{name}")

    def leftovers(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if self.prefix[1:] in name]

    # -- framing -------------------------------------------------------------------------------------------

    def send(self, channel: str, message: bytes) -> None:
        name = "cmd-side" if channel == "side" else "cmd"
        region = self._maps[name]
        if not self.futex:
            assert len(message) + 4 <= self.json_size
            self._wait(lambda: _try(self._semaphores[name + "-wr"]))
            region[4 : 4 + len(message)] = message
            region[:4] = struct.pack("<I", len(message))
            self._semaphores[name + "-rd"].release()
            return
        assert 0 < len(message) <= self.json_size // 2 - 16
        self._wait(lambda: self._word(name, 0) == 0)
        region[:4] = b"\xff\xff\xff\xff"
        region[4 : 4 + len(message)] = message
        region[:4] = struct.pack("<I", len(message))
        self._wake(name, 0)

    def receive(self, channel: str) -> bytes:
        name = "resp-side" if channel == "side" else "resp"
        region = self._maps[name]
        if not self.futex:
            self._wait(lambda: _try(self._semaphores[name + "-rd"]))
            (length,) = struct.unpack("<I", region[:4])
            message = region[4 : 4 + length]
            self._semaphores[name + "-wr"].release()
            return message
        half = self.json_size // 2
        self._wait(lambda: self._word(name, half) not in (0, 0xFFFFFFFF))
        length = self._word(name, half)
        message = region[half + 4 : half + 4 + length]
        region[half : half + 4] = bytes(4)
        return message

    def _word(self, name: str, offset: int) -> int:
        return int(struct.unpack("<I", self._maps[name][offset : offset + 4])[0])

    def _wake(self, name: str, offset: int) -> None:
        word = ctypes.c_uint32.from_buffer(self._maps[name], offset)
        number = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
        _libc.syscall(number, ctypes.byref(word), 1, 0x7FFFFFFF, None, None, 0)
        del word

    def _wait(self, condition: Any) -> None:
        end = time.monotonic() + PATIENCE
        pause = 0.00005
        while not condition():
            if self.process_ended():
                raise RuntimeDied(f"exit status {self.process.returncode}")
            if time.monotonic() > end:
                raise TimeoutError(f"nothing from the runtime for {PATIENCE} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)

    def process_ended(self) -> bool:
        return hasattr(self, "process") and self.process.poll() is not None

    # -- requests ------------------------------------------------------------------------------------------

    def raw(self, channel: str, message: bytes) -> dict[str, Any]:
        self.send(channel, message)
        reply: dict[str, Any] = json.loads(self.receive(channel))
        return reply

    def main(self, **request: Any) -> dict[str, Any]:
        """Send any request on the main channel, and return the whole reply."""
        return self.raw("main", json.dumps(request).encode())

    def begin_side(self, *, user: str | None = None, admin: bool = False, **request: Any) -> str:
        """Send a request on the side channel, and return the id of the reply to wait for."""
        rid = uuid.uuid4().hex[:16]
        request["$rid"] = rid
        if user is not None:
            request["$auth"] = {"user": user, "is_admin": admin}
        self.send("side", json.dumps(request).encode())
        return rid

    def end_side(self, rid: str) -> dict[str, Any]:
        while rid not in self._stray:
            reply = json.loads(self.receive("side"))
            self._stray[reply["$rid"]] = reply
        return self._stray.pop(rid)

    def side(self, *, user: str | None = None, admin: bool = False, **request: Any) -> dict[str, Any]:
        return self.end_side(self.begin_side(user=user, admin=admin, **request))

    def upload(self, wasm: bytes, user: str | None = None) -> str:
        reply = self.side(op="mk_module", binary=base64.b64encode(wasm).decode(), user=user)
        assert reply["type"] == "ok", reply
        return str(reply["data"]["module_id"])

    def instantiate(
        self, module: str, arg: Any = "", prompt: Any = (1,), user: str | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Instantiate a controller. Returns the request id and the whole reply."""
        req_id = f"run-{uuid.uuid4()}"
        prompt = list(prompt) if not isinstance(prompt, str) else prompt
        reply = self.side(op="instantiate", req_id=req_id, prompt=prompt, module_id=module, module_arg=arg, user=user)
        return req_id, reply

    # -- dialect 2 -----------------------------------------------------------------------------------------

    def mid(self, *ops: dict[str, Any], freed: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
        """Run a step of dialect 2, and return its data."""
        filled = [{"backtrack": 0, "tokens": [], "sampled": None, **op} for op in ops]
        reply = self.main(op="mid_process", ops=filled, freed=list(freed), **more)
        assert reply["type"] == "ok", reply
        data: dict[str, Any] = reply["data"]
        return data

    def answer(self, data: dict[str, Any], seq: int) -> dict[str, Any]:
        found: dict[str, Any] = data["seqs"][str(seq)]
        return found

    def settle(self, data: dict[str, Any], seq: int, limit: float = math.inf) -> dict[str, Any]:
        """Repeat the request, a limited number of times, while the sequence reports that it is late."""
        answer = self.answer(data, seq)
        logs = ""
        end = time.monotonic() + PATIENCE
        while answer["result"] and answer["logs"].startswith("\u23f3") and limit and time.monotonic() < end:
            answer = self.answer(self.mid({"id": seq}), seq)
            limit -= 1
        answer["logs"] = logs + answer["logs"]
        return answer

    def start(self, module: str, seq: int, arg: Any = "", user: str | None = None) -> dict[str, Any]:
        """Instantiate a controller, run its first step, and return its answer."""
        req_id, reply = self.instantiate(module, arg, user=user)
        assert reply["type"] == "ok" and not reply["data"]["error"], reply
        return self.settle(self.mid({"id": seq, "req_id": req_id}), seq)

    def next(self, seq: int, tokens: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
        """Run one further step of one sequence, and return its answer."""
        sampled = tokens[0] if len(tokens) == 1 else None
        op = {"id": seq, "tokens": list(tokens), "sampled": sampled, **more}
        return self.settle(self.mid(op), seq)

    def row(self, data: dict[str, Any], index: int, vocab_size: int) -> list[int]:
        """Return the tokens that a mask row allows."""
        stride, first = data["mask_num_bytes"], data["first_mask_byte_offset"]
        raw = self.bin[first + index * stride : first + (index + 1) * stride]
        if data["dtype"] == "bool":
            return [t for t in range(8 * len(raw)) if raw[t >> 3] >> (t & 7) & 1]
        kind = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[data["dtype"]]
        values = np.frombuffer(raw, kind)
        assert len(values) == data["mask_num_elts"] >= vocab_size
        forbidden = values == 0xFF80 if data["dtype"] == "bf16" else np.isneginf(values)
        assert set(np.flatnonzero(~forbidden)) == set(np.flatnonzero(values == 0))
        return [int(token) for token in np.flatnonzero(values == 0)]

    # -- the end -------------------------------------------------------------------------------------------

    def descendants(self) -> list[int]:
        """Return the ids of the runtime's processes that have not ended."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry))
        return found

    def workers(self) -> list[int]:
        """Return the ids of the processes two levels below the runtime, which are the children of the fork server."""
        parents = {}
        for pid in self.descendants():
            with contextlib.suppress(OSError):  # it may have ended since
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        nursery = [pid for pid, parent in parents.items() if parent == self.process.pid]
        return [pid for pid, parent in parents.items() if parent in nursery]

    def close(self) -> None:
        """End the runtime like the original engine, and check that all of its processes and shared objects are gone."""
        try:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(PATIENCE)
            until(lambda: not self.descendants())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.unlink()
            for semaphore in self._semaphores.values():
                semaphore.close()


def _try(semaphore: posix_ipc.Semaphore) -> bool:
    try:
        semaphore.acquire(0)
    except posix_ipc.BusyError:
        return False
    return True
