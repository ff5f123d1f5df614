"""Renders a Jinja chat template in a sandbox that limits the number of steps, and the size of texts.

The module is also a small program. Run as a script, it renders one template from standard input, in a process with
limits of memory and processor time, and in the operating system's sandbox. It therefore imports only the standard
library, jinja2 and the sandbox.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILE = "<template>"  # the file name that jinja2 gives to templates made from strings
_MAX_BITS = 4_096  # of integers that a template computes
_MAX_REASON = 500


class TemplateLimits(NamedTuple):
    """Limits of rendering. `max_steps` is the maximum number of executed lines of the compiled template, and
    `max_chars` is the maximum length of every text that is joined."""

    max_steps: int
    max_chars: int


OWN_LIMITS = TemplateLimits(max_steps=5_000_000, max_chars=32 << 20)
CLIENT_LIMITS = TemplateLimits(max_steps=500_000, max_chars=4 << 20)


class TemplateError(Exception):
    """A template was not rendered. `kind`: `syntax`, `refused` (the template raised an error on purpose), `limit` or
    `failed`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ChatTemplateProgram:
    """A compiled template. Raises `TemplateError` if `source` is not a valid template."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._limits = limits
        self.source = source
        try:
            self._template = ChatEnvironment(limits).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError("syntax", f"line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise TemplateError("syntax", _reason(error)) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the rendered text. Raises `TemplateError`."""
        before = sys.gettrace()
        sys.settrace(_step_counter(self._limits.max_steps))  # for this thread only
        _rendered.variables = variables
        try:
            return self._template.render(variables)
        except TemplateError:
            raise
        except MemoryError as error:
            raise TemplateError("limit", "rendering needs too much memory") from error
        except Exception as error:  # any error of a template's expressions
            raise TemplateError("failed", _reason(error)) from error
        finally:
            sys.settrace(before)
            del _rendered.variables


#: The variables of the template that a thread is rendering.
_rendered = threading.local()


def _lists_in(value: Any) -> Iterator[list[Any]]:
    """Yield the lists in a template's variables, which belong to the caller."""
    if isinstance(value, list):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _lists_in(each)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox under the limits of this module, with only the functions that chat templates expect."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.code_generator_class = _CodeGenerator
        self.concat = self.join  # type: ignore[method-assign]
        self._limits = limits
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return the sandbox's decision, but allow changes of a template's own lists, in which templates collect
        messages."""
        if attr in ("append", "pop") and isinstance(obj, list):
            return all(obj is not each for each in _lists_in(getattr(_rendered, "variables", {})))
        return super().is_safe_attribute(obj, attr, value)

    def join(self, parts: Iterable[Any]) -> str:
        """Return the joined parts. Raises `TemplateError` if the result would exceed the limit."""
        texts = [str(part) for part in parts]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator. Raises `TemplateError` if the result would exceed a limit."""
        if operator == "**":
            _check_bits(_bits(left) * (abs(right) if isinstance(right, int) else 1))
        elif operator == "*":
            _check_bits(_bits(left) + _bits(right))
            self._check_size(_length(left) * _count(right) + _length(right) * _count(left))
        else:
            self._check_size(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_chars:
            raise TemplateError("limit", f"the template builds more than {self._limits.max_chars} characters")


class _CodeGenerator(CodeGenerator):
    """Compiles `a ~ b` to a call of `join`, which checks the size."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """Ignores the tag `{% generation %}`, which marks the model's own text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# -- limits --------------------------------------------------------------------------------------------------


def _step_counter(max_steps: int) -> Any:
    """Return a trace function that ends a template after `max_steps` lines."""
    steps = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > max_steps:
            raise TemplateError("limit", f"rendering takes more than {max_steps} steps")
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == _FILE else None

    return enter


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateError("limit", f"the template computes a number of more than {_MAX_BITS} bits")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


# -- functions and filters for templates ---------------------------------------------------------------------


def _raise_exception(message: Any) -> None:
    raise TemplateError("refused", str(message)[:_MAX_REASON])


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON in the format of training data: not escaped for HTML, with characters unchanged."""
    known = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=_listed, **known)


def _listed(value: Any) -> list[Any]:
    """Return the items of a generator, which filters such as `map` and `selectattr` return."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]


# -- as a program --------------------------------------------------------------------------------------------


def main() -> None:
    """Render the template in the JSON of standard input; write the text or the error as JSON to standard output."""
    task = json.load(sys.stdin)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from bridle import os_sandbox

    time.localtime()  # reads the time zone's file before the sandbox forbids that
    _bound_process(task["memory"], task["seconds"])
    os_sandbox.enter()
    try:
        program = ChatTemplateProgram(task["source"], TemplateLimits(*task["limits"]))
        answer = {"text": program.render(task["variables"])}
    except TemplateError as error:
        answer = {"kind": error.kind, "message": str(error)}
    json.dump(answer, sys.stdout)


def _bound_process(memory: int, seconds: int) -> None:
    try:
        import resource
    except ImportError:  # on Windows, only the parent's timeout limits the process
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


if __name__ == "__main__":
    main()
