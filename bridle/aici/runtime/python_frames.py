"""Finds the line that a CPython guest was running when it was ended, by reading the guest's memory.

Reading the memory costs the interpreter no time. For debuggers, CPython has a table of its memory layout, which begins
with known bytes. This module supports only 32-bit CPython 3.14, which components use, and finds nothing in other
versions.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from bridle.aici.runtime.linear_memory import LinearMemory, Unreadable, memories
from bridle.aici.runtime.own_memory import own_memory

#: The file name that the standard controller for Python gives to the user's script. Frames of the controller itself are
#: not shown.
SCRIPT = "script.py"
_COOKIE = b"xdebugpy"
_NUM_ENTRIES = 80  # number of table entries that are read
_VERSION = 0x30E
_MAX_FRAMES = 200
_MAX_SHOWN = 20
_MAX_NAME = 200
_MAX_TABLE = 1 << 20
#: The owner of frames that the interpreter puts between Python and C; such frames have no code.
_NO_CODE = 3
#: Codecs by the width of characters in bytes. Below: bytes between the head of a non-ASCII text and its characters.
_CODECS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
_BEFORE_WIDE = 8
_POINTER = 0xFFFFFFFC  # the low bits of a reference are a tag


@dataclass(frozen=True, slots=True)
class Frame:
    """A running function of a Python guest, and the line at which it runs."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.function}'


class _Layout:
    """The memory layout from the interpreter's table. Raises `Unreadable` if the table belongs to another version of
    CPython."""

    def __init__(self, table: bytes) -> None:
        numbers = struct.unpack(f"<{_NUM_ENTRIES}Q", table)
        version = numbers[0]
        if version >> 16 != _VERSION:
            raise Unreadable(f"the memory layout of Python version {version:#x} is unknown")
        self.interpreters = numbers[4]
        self.threads = numbers[8]
        self.current_frame = numbers[25]
        self.previous, self.executable, self.instruction = numbers[31:34]
        self.owner = numbers[35]
        self.file, _, self.function, self.lines, self.first_line = numbers[39:44]
        self.code = numbers[47]
        self.bytes_size, self.bytes_data = numbers[74:76]
        _, self.text_state, self.text_size, self.text_data = numbers[76:80]


def whereabouts() -> str:
    """Return the call stacks of the Python guests in this process, the innermost line last. The text is empty if the
    process has no Python guests, or if the sandbox hides their memory."""
    with contextlib.suppress(OSError):
        for memory in memories(own_memory()):
            frames = _frames_in(memory)
            if frames:
                return "\n".join(map(str, _shown(frames)))
    return ""


def _shown(frames: list[Frame]) -> list[Frame | str]:
    """Return the frames to show: only the script's own frames if a script runs. A text replaces the middle of a long
    stack."""
    frames = [frame for frame in frames if frame.file == SCRIPT] or frames
    if len(frames) <= _MAX_SHOWN:
        return [*frames]
    half = _MAX_SHOWN // 2
    return [*frames[:half], f"  ... {len(frames) - 2 * half} more", *frames[-half:]]


def _frames_in(memory: LinearMemory) -> list[Frame]:
    """Return the running functions of the interpreter in this memory, the innermost last."""
    try:
        runtime = memory.find(_COOKIE)
        if runtime is None:
            return []
        layout = _Layout(memory.read(runtime + len(_COOKIE), 8 * _NUM_ENTRIES))
        return list(_walk(memory, layout, runtime))[::-1]
    except (Unreadable, UnicodeError):
        return []


def _walk(memory: LinearMemory, layout: _Layout, runtime: int) -> Iterator[Frame]:
    interpreter = _number(memory, runtime + layout.interpreters)
    thread = _number(memory, interpreter + layout.threads)
    place = _number(memory, thread + layout.current_frame)
    for _ in range(_MAX_FRAMES):
        if not place:
            return
        if memory.read(place + layout.owner, 1)[0] < _NO_CODE:
            yield _frame(memory, layout, place)
        place = _number(memory, place + layout.previous)


def _frame(memory: LinearMemory, layout: _Layout, place: int) -> Frame:
    code = _number(memory, place + layout.executable) & _POINTER
    offset = _number(memory, place + layout.instruction) - (code + layout.code)
    table = _bytes(memory, layout, _number(memory, code + layout.lines))
    first = _number(memory, code + layout.first_line)
    file, function = (_text(memory, layout, _number(memory, code + where)) for where in (layout.file, layout.function))
    return Frame(file, line_at(table, first, offset), function)


def line_at(table: bytes, first: int, offset: int) -> int:
    """Return the line of the instruction at byte `offset` of the code whose first line is `first`."""
    line, end, place = first, 0, 0
    while place < len(table):
        kind, length = table[place] >> 3 & 15, (table[place] & 7) + 1
        place += 1
        numbers = []
        # an entry continues up to the next byte with the top bit set
        while place < len(table) and not table[place] & 0x80:
            numbers.append(table[place])
            place += 1
        if 10 <= kind <= 12:
            line += kind - 10
        elif kind in (13, 14):
            line += _signed(numbers)
        end += 2 * length
        if offset < end:
            return line
    return line


def _signed(numbers: list[int]) -> int:
    """Decode the first number of an entry: six bits in each byte, lowest bits first. The lowest bit of the number is
    the sign."""
    value = 0
    for place, number in enumerate(numbers):
        value |= (number & 63) << 6 * place
        if not number & 64:
            break
    return -(value >> 1) if value & 1 else value >> 1


# -- objects -----------------------------------------------------------------------------------------------


def _number(memory: LinearMemory, place: int) -> int:
    return int.from_bytes(memory.read(place, 4), "little")


def _bytes(memory: LinearMemory, layout: _Layout, place: int) -> bytes:
    """Return the content of a bytes object."""
    size = _number(memory, place + layout.bytes_size)
    return memory.read(place + layout.bytes_data, min(size, _MAX_TABLE))


def _text(memory: LinearMemory, layout: _Layout, place: int) -> str:
    """Return the content of a str object. The object's state field gives the width of a character and whether all are
    ASCII."""
    size = min(_number(memory, place + layout.text_size), _MAX_NAME)
    state = _number(memory, place + layout.text_state)
    width, is_ascii = state >> 2 & 7, state >> 6 & 1
    if width not in _CODECS:
        raise Unreadable(f"no text at {place:#x}")
    data = place + layout.text_data + (0 if is_ascii else _BEFORE_WIDE)
    return memory.read(data, size * width).decode(_CODECS[width], "replace")
