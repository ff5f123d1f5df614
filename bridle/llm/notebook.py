"""Display in notebooks: coloured conversations, growing outputs, and the progress of a batch.

Outside a notebook, nothing is displayed, and IPython is not imported. Texts are escaped. The colours are transparent,
so that they suit light and dark pages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from bridle.outputs import RequestOutput
from bridle.traces import Trace
from bridle.traces.highlight import TextSpan, html_of, spans

_BLOCK = "white-space:pre-wrap;font-family:monospace"
_WHO = "font-weight:600;opacity:.7"
#: Minimum time between two updates of the display, and the maximum share of time for updates.
_PAUSE = 0.1
_SHARE = 0.1


def in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel that can display HTML."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Live:
    """An output area in a notebook whose content can change. Updates that come too fast are skipped, except the last
    one."""

    def __init__(self, page: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        from IPython.display import HTML, display

        self._html: Callable[[str], Any] = HTML
        self._handle: Any = display(HTML(page), display_id=True)
        self._clock = clock
        self._next = clock()

    def update(self, page: Callable[[], str], *, is_last: bool = False) -> None:
        """Show HTML in place of the previous content. `page` returns the HTML, and is called only if the update is not
        skipped."""
        began = self._clock()
        if began < self._next and not is_last:
            return
        self._handle.update(self._html(page()))
        took = self._clock() - began
        self._next = began + max(_PAUSE, took / _SHARE)


class LiveOutput:
    """Shows the first output of a request while it grows. In a notebook, a traced output has colours. Outside a
    notebook, the text is written to standard output, and rolled-back text stays visible."""

    def __init__(self) -> None:
        self._live = Live() if in_notebook() else None
        self._written = ""

    def update(self, output: RequestOutput, *, is_last: bool = False) -> None:
        """Show the current state of the output."""
        if self._live is not None:
            self._live.update(lambda: page_of_output(output), is_last=is_last)
            return
        text = output.text
        if not text.startswith(self._written):
            sys.stdout.write("\n")
            self._written = ""
        sys.stdout.write(text[len(self._written) :] + ("\n" if is_last else ""))
        sys.stdout.flush()
        self._written = text


class ProgressBar:
    """Progress bar of a batch, with the finished requests and the speed."""

    def __init__(self, num_requests: int) -> None:
        self._total = num_requests
        self._began = time.monotonic()
        self._live = Live(self._page(0, 0))

    def update(self, num_done: int, num_tokens: int) -> None:
        """Show the current progress."""
        self._live.update(lambda: self._page(num_done, num_tokens))

    def close(self) -> None:
        """Remove the bar."""
        self._live.update(str, is_last=True)

    def _page(self, num_done: int, num_tokens: int) -> str:
        seconds = time.monotonic() - self._began
        speed = f" · {num_tokens / seconds:.0f} tokens/s" if num_tokens and seconds else ""
        return f'<progress value="{num_done}" max="{self._total}"></progress> {num_done}/{self._total}{speed}'


def page_of_output(output: RequestOutput) -> str:
    """Return the text of the first output, without its prompt, as HTML."""
    return f'<div style="{_BLOCK}">{_coloured(output.trace, output.text)}</div>'


def page_of_talk(messages: Iterable[Mapping[str, Any]], traces: Mapping[int, Trace]) -> str:
    """Return a conversation as HTML. `traces` has the traces of answers, by the index of the message."""
    blocks = []
    for number, message in enumerate(messages):
        who = f'<span style="{_WHO}">{escape(str(message.get("role", "")))}</span>'
        blocks.append(f"<div>{who}\n{_coloured(traces.get(number), _said(message))}</div>")
    return f'<div style="{_BLOCK}">{"".join(blocks)}</div>'


def _coloured(trace: Trace | None, text: str) -> str:
    return html_of([TextSpan(text, "prompt")] if trace is None else spans(trace, prompt=False))


def _said(message: Mapping[str, Any]) -> str:
    """Return a message as text, with placeholders for media and tool calls."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [_part(part) for part in content]
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return "\n".join([*parts, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]).strip("\n")


def _part(part: Any) -> str:
    if isinstance(part, Mapping):
        return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"
    return str(part)
