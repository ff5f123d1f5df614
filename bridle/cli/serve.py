"""`bridle serve`: a model behind HTTP."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

from bridle.cli.options import EngineOptions, ModelOptions

_MODEL = ModelOptions()
_ENGINE = EngineOptions()
_SERVER = Group("Server", sort_key=5)


def serve(
    name: Annotated[str, Parameter(name="MODEL")] = "demo",
    /,
    *,
    host: Annotated[str, Parameter(group=_SERVER)] = "127.0.0.1",
    port: Annotated[int, Parameter(group=_SERVER)] = 8080,
    model: ModelOptions = _MODEL,
    engine: EngineOptions = _ENGINE,
) -> int:
    """Serve a model over HTTP, with the OpenAI API.

    `bridle serve` serves the demo model on http://127.0.0.1:8080; `bridle serve Qwen/Qwen3-0.6B --port 9000`
    another one elsewhere.

    Parameters
    ----------
    name
        Folder, hub id or `demo`.
    host
        Address to listen on. The default is reachable from this machine alone.
    port
        Port to listen on; 0 takes a free one.
    """
    if not 0 <= port <= 65535:
        from bridle.errors import InvalidRequest

        raise InvalidRequest(f"--port is {port}; must be between 0 and 65535", "port")
    from bridle.http.server import serve as serve_http

    serve_http(model.to_config(name), engine.to_config(), host=host, port=port)
    return 0
