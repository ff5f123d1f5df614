"""A child process that tests a grammar first: compiling it may exhaust time, memory or stack without harm to the
server.

Run as a program, it reads one JSON line per grammar, and answers each with one line. The process compiles the grammar
over single bytes instead of a model's vocabulary, and computes the first mask. The compiling thread has a smaller stack
than any thread of the calling process. The process imports only the standard library, llguidance and the sandbox.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

_STACK = 1 << 20
_PAGE = 4096
_MAX_MESSAGE = 300
_EOS = 256


class ByteVocabulary:
    """A vocabulary with one token for each byte, and one token that ends a text, for `llguidance.TokenizerWrapper`."""

    eos_token_id = _EOS
    bos_token_id = None
    special_token_ids = (_EOS,)

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(_EOS)] + [b"<end>"]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer() -> Any:
    """Return a tokenizer of single bytes."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary()))


def first_line(message: str) -> str:
    """Return the part of llguidance's error message that helps users: without its state, and without the whole
    grammar."""
    lines = [line.strip() for line in message.split("<state>")[0].strip().splitlines()]
    detail = next((line.removeprefix("error:").strip() for line in lines if line.startswith("error:")), "")
    text = lines[0] if lines else "unknown error"
    if len(text) > _MAX_MESSAGE:
        text = text[: _MAX_MESSAGE - 3] + "..."
    return f"{text} {detail}".strip()


def try_grammar(tokenizer: Any, grammar: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Return `{"bytes": n}` with the approximate memory of the compiled grammar, or `{"error": why}`."""
    import llguidance

    before = allocated()
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"error": reason(matcher)}
    return {"bytes": max(allocated() - before, 0)}


def reason(matcher: Any) -> str:
    """Return the reason why a matcher failed."""
    if matcher.stop_reason() == "NoExtensionBias" or matcher.get_error().startswith("NoExtensionBias"):
        return "it allows no text at all"
    return first_line(matcher.get_error())


def main() -> None:
    """Test grammars from standard input until it ends, in the operating system's sandbox."""
    import llguidance  # noqa: F401 -- before files are out of reach

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from bridle import os_sandbox

    _statm(0)  # opens the file that it reads
    os_sandbox.enter()
    worker = threading.Thread(target=serve)
    worker.start()
    worker.join()


def serve() -> None:
    tokenizer = byte_tokenizer()
    for line in sys.stdin.buffer:
        job = json.loads(line)
        _bound(job["seconds"], job["memory"])
        answer = try_grammar(tokenizer, job["grammar"], job["limits"])
        answer["seconds"] = job["seconds"] - _unbound()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _bound(seconds: float, memory: int) -> None:
    """Let the operating system end this process if it takes too much time or memory from now on."""
    try:
        import resource
    except ImportError:  # on Windows: only the parent's time-out remains
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _unbound() -> float:
    """Remove the time limit of this process. Returns the processor seconds that were left."""
    return signal.setitimer(signal.ITIMER_PROF, 0)[0] if hasattr(signal, "setitimer") else 0.0


class _HeapNumbers(ctypes.Structure):
    """glibc's `struct mallinfo2`: `hblkhd` bytes are allocated by mmap, `uordblks` from the heap."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def allocated() -> int:
    """Return the number of allocated bytes. The size of the process would be misleading: a grammar may reuse memory
    that an earlier grammar freed, and then seem to need none."""
    try:
        numbers = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # without glibc, or with one from before 2021
        return _statm(1)
    numbers.restype = _HeapNumbers
    found = numbers()
    return int(found.uordblks + found.hblkhd)


def _virtual() -> int:
    return _statm(0)


@cache
def _open_statm() -> int:
    """Open the kernel's file about this process's memory, and keep it open."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def _statm(column: int) -> int:
    try:
        return int(os.pread(_open_statm(), 256, 0).split()[column]) * _PAGE
    except OSError:  # only Linux has this file
        return 0 if column else 1 << 40


if __name__ == "__main__":
    threading.stack_size(_STACK)
    main()
