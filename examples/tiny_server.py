"""A small HTTP server that uses `AsyncEngine`, built from bridle's parts.

    python examples/tiny_server.py demo
    curl -N localhost:8000/generate -d '{"prompt": "Once upon a time", "max_tokens": 40}'

Text arrives as server-sent events while it is generated. A client that disconnects cancels its request. `bridle serve`
is the full server; this example is a starting point for your own server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator

import fastapi
import uvicorn
from fastapi.responses import JSONResponse, StreamingResponse

from bridle import BridleError, ModelConfig, SamplingParams
from bridle.engine import AsyncEngine, Engine, EventStream, Request
from bridle.model import load_executor, resolve_model
from bridle.outputs import Finished, TokenEvent
from bridle.serving import new_request_id, new_seed
from bridle.tokenizer import Detokenizer, Tokenizer


def make_app(model: str) -> tuple[fastapi.FastAPI, AsyncEngine]:
    """Return the application and its engine, which the caller must close."""
    tokenizer = Tokenizer.load(resolve_model(model))
    engine = AsyncEngine(Engine(load_executor(ModelConfig(model)), decoder=Detokenizer(tokenizer))).start()
    app = fastapi.FastAPI()

    @app.post("/generate", response_model=None)
    async def generate(http: fastapi.Request) -> StreamingResponse | JSONResponse:
        try:
            body = await http.json()
            prompt = tuple(tokenizer.encode(body.pop("prompt")))
            stream = engine.submit(Request(new_request_id(), prompt, SamplingParams(**{"seed": new_seed(), **body})))
        except (BridleError, TypeError, ValueError, KeyError, AttributeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return StreamingResponse(events_of(stream), media_type="text/event-stream")

    return app, engine


async def events_of(stream: EventStream) -> AsyncIterator[str]:
    """Yield the server-sent events of one request; leaving the iteration early cancels the request."""
    async with stream:
        async for events in stream:
            for event in events:
                if isinstance(event, (TokenEvent, Finished)) and event.text:
                    yield f"data: {json.dumps({'index': event.index, 'text': event.text})}\n\n"


if __name__ == "__main__":
    app, engine = make_app(sys.argv[1] if len(sys.argv) > 1 else "demo")
    with engine:
        uvicorn.run(app, port=8000)
