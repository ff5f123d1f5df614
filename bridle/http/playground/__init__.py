"""The playground: the page at `/` and the files that it consists of. `make web` builds them from `web/`, and they
ship with the package, so that serving them takes no Node and no network.

The page is the same for everybody and does not name models; it requests them, with a key if one is needed.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.state import json_response

router = APIRouter()

#: The files of the page, and what they are; the page itself is at `/`.
TYPES = {
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "index.html": "text/html; charset=utf-8",
    "pdf.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
PAGE = "index.html"
#: Where browsers find the others, for everybody.
PATHS = tuple(f"/playground/{name}" for name in TYPES if name != PAGE)
HEADERS = {
    # Nothing is loaded from elsewhere, nothing inline runs, no text can become HTML, and no other site may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a new version is seen at once; an old one costs a question
    "Vary": "Accept-Encoding, Accept",
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page, plain and compressed."""

    plain: bytes
    packed: bytes
    tag: str


@cache
def file(name: str) -> File:
    """A file of the page. It is read and compressed once."""
    plain = files("bridle.http.playground").joinpath("files", name).read_bytes()
    return File(plain, gzip.compress(plain, mtime=0), f'"{hashlib.sha256(plain).hexdigest()[:32]}"')


def answer(request: Request, name: str) -> Response:
    """Return the file, compressed if the browser accepts that, or "not modified"."""
    found = file(name)
    headers = HEADERS | {"ETag": found.tag}
    if found.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(found.plain, media_type=TYPES[name], headers=headers)
    return Response(found.packed, media_type=TYPES[name], headers=headers | {"Content-Encoding": "gzip"})


@router.get("/playground/{name}", include_in_schema=False)
async def part(name: str, request: Request) -> Response:
    """One of the files that the page consists of."""
    if name not in TYPES or name == PAGE:
        return json_response({"error": {"message": "there is no such file", "type": "not_found"}}, 404)
    return answer(request, name)
