"""One request that is read while it runs, sync or async. A reader gets pieces of text, changes, or the growing output.

    for piece in llm.stream("Once upon a time"):
        print(piece, end="", flush=True)

The request starts when the stream is created. Leaving the loop early, or leaving a `with` block, cancels the request.
Deleting the last reference to an unfinished stream cancels the request too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, Self, TypeVar

from bridle.chat.chat_request import ChatRequest
from bridle.chat.stream_deltas import Content, StreamDelta
from bridle.engine.client import EngineClient, EventStream
from bridle.engine.request import Request
from bridle.llm.notebook import LiveOutput
from bridle.llm.structured_parse import ParsedType, content_of, partials
from bridle.outputs import RequestOutput
from bridle.serving import Delta, DeltaReader, OutputCollector, RewindPolicy, raise_first_error
from bridle.serving.lifecycle.request_handle import RequestHandle

T = TypeVar("T")


class Reader(Generic[T]):
    """Iterator over the items of a stream. The iterator can be used once, with `for` or `async for`. If an output
    failed, its error is raised when the iteration ends."""

    def __init__(self, source: _Source, take: Callable[[], list[T]] | None = None) -> None:
        self._source = source
        self._given = take
        self._last: Callable[[], T] | None = None

    def _take(self) -> list[T]:
        """Return the items since the last call."""
        assert self._given is not None  # otherwise a subclass overrides this method
        return self._given()

    def ending_with(self, last: Callable[[], T]) -> Self:
        """Return this reader with one more item at its end. `last` computes this item after all other items were
        read."""
        self._last = last
        return self

    def __iter__(self) -> Iterator[T]:
        try:
            for events in self._source.stream:
                self._source.add(events)
                yield from self._take()
        finally:
            self._source.cancel()
        self._source.end()
        if self._last is not None:
            yield self._last()

    async def __aiter__(self) -> AsyncIterator[T]:
        try:
            async for events in self._source.stream:
                self._source.add(events)
                for item in self._take():
                    yield item
        finally:
            self._source.cancel()
        self._source.end()
        if self._last is not None:
            yield self._last()


class _Source(RequestHandle):
    """A running request, and the function that is called when the request has ended. Streams and readers of the request
    refer to this object, but this object does not refer to them."""

    def __init__(
        self, stream: EventStream, collector: OutputCollector, on_finish: Callable[[RequestOutput], None] | None
    ) -> None:
        super().__init__(stream, collector)
        self._on_finish = on_finish

    def end(self) -> None:
        raise_first_error(self.output)
        if self._on_finish is not None:
            self._on_finish(self.output)


class TextStream(Reader[str]):
    """Stream of the text of a request's first output, in pieces that do not change any more. For a conversation, the
    stream has the content of the answer.

    Text that a controller may still roll back is held back until it is final. A controller that never rolls back should
    set its attribute `max_rewind` to 0, so that no text is held back. To see text at once, even if it is rolled back
    later, read `deltas`.
    """

    def __init__(
        self,
        client: EngineClient,
        request: Request,
        prompt: str | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
        turn: ChatRequest | None = None,
    ) -> None:
        """`on_finish` is called with the whole output. `turn` parses the output of a conversation."""
        self._collector = OutputCollector(request, prompt)
        self._deltas = DeltaReader(self._collector, RewindPolicy.HOLD)
        self._turn_plan, self._turn = turn, None if turn is None else turn.reader()
        try:
            self._base = _Source(client.submit(request), self._collector, on_finish)
            super().__init__(self._base)
        except KeyboardInterrupt:  # an interrupt may come between any two lines, before the caller has the stream
            client.cancel(request.id)
            raise

    @property
    def request(self) -> Request:
        """Return the request of the stream."""
        return self._collector.request

    @property
    def output(self) -> RequestOutput:
        """Return the output that has been read so far. The output is complete after the iteration has ended. The output
        must not be modified."""
        return self._collector.output

    def deltas(self) -> Reader[Delta]:
        """Return a reader of changes instead of text. The reader gives the changes of every output, including
        rolled-back tokens and forks."""
        return Reader(self._base, DeltaReader(self._collector, RewindPolicy.EVENT).read)

    def outputs(self) -> Reader[RequestOutput]:
        """Return a reader of the growing `output` instead of text. The reader yields the output each time it has
        changed."""
        return Reader(self._base, lambda: [self._collector.output])

    def objects(self, kind: ParsedType[T]) -> Reader[T]:
        """Return a reader of the parsed object instead of text. The reader yields the object each time it has grown.
        The last object that the reader yields is complete and valid."""
        reader = Reader(self._base, partials(kind, lambda: self._collector.output, self._turn_plan))
        return reader.ending_with(lambda: kind.read(self.output, content_of(self.output, self._turn_plan)))

    def pieces(self) -> Reader[StreamDelta]:
        """Return a reader of the conversation's answer instead of text: reasoning, content and tool calls while they
        are generated."""
        return Reader(self._base, self._take_pieces)

    def show(self) -> RequestOutput:
        """Read the stream to its end, and show the first output while it grows. In a notebook, the output is updated in
        place. If the request is traced (`trace=True`), tokens are coloured by their origin. Outside a notebook, the
        text is written to standard output."""
        shown = LiveOutput()
        for output in self.outputs():
            shown.update(output)
        shown.update(self.output, is_last=True)
        return self.output

    async def show_async(self) -> RequestOutput:
        """Run `show` in an event loop."""
        shown = LiveOutput()
        async for output in self.outputs():
            shown.update(output)
        shown.update(self.output, is_last=True)
        return self.output

    def _ipython_display_(self) -> None:
        """Show the stream, because it is the value of a notebook cell."""
        self.show()

    def read(self) -> str:
        """Wait for the end of the stream, and return the whole text."""
        for _ in self:
            pass
        return self._whole

    async def read_async(self) -> str:
        """Wait for the end of the stream, and return the whole text."""
        async for _ in self:
            pass
        return self._whole

    @property
    def _whole(self) -> str:
        message = self.output.message
        return self.output.text if message is None else message.content

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Safe from any thread."""
        self._base.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def _take(self) -> list[str]:
        return [piece.text for piece in self._take_pieces() if isinstance(piece, Content)]

    def _take_pieces(self) -> list[StreamDelta]:
        found: list[StreamDelta] = []
        for delta in self._deltas.read():
            if delta.index == 0 and self._turn is not None:
                found += self._turn.push(delta.text, delta.is_last)
            elif delta.index == 0 and delta.text:
                found.append(Content(delta.text))
        return found
