"""The playground: the page at `/` and its files. `make web` builds the files from `web/`. The package contains the
built files, so that the server needs neither Node nor network.

The page is the same for every user and does not name models. The page requests the list of models, with an API key if
the server needs one.
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

#: The files of the page, with their media types; the page itself is at `/`.
TYPES = {
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "index.html": "text/html; charset=utf-8",
    "pdf.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
PAGE = "index.html"
#: The paths of the page's files, which need no API key.
PATHS = tuple(f"/playground/{name}" for name in TYPES if name != PAGE)
HEADERS = {
    # The page loads nothing from other sites and runs no inline script. No text can become HTML, and no other site may
    # frame the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers revalidate, so a new version is seen at once
    "Vary": "Accept-Encoding, Accept",
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page: its content, uncompressed and compressed."""

    plain: bytes
    packed: bytes
    tag: str


@cache
def file(name: str) -> File:
    """Return a file of the page. Each file is read and compressed only once."""
    plain = files("bridle.http.playground").joinpath("files", name).read_bytes()
    return File(plain, gzip.compress(plain, mtime=0), f'"{hashlib.sha256(plain).hexdigest()[:32]}"')


def answer(request: Request, name: str) -> Response:
    """Return a response with the file, compressed if the browser accepts that. If the browser has the file, the status
    is 304."""
    found = file(name)
    headers = HEADERS | {"ETag": found.tag}
    if found.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(found.plain, media_type=TYPES[name], headers=headers)
    return Response(found.packed, media_type=TYPES[name], headers=headers | {"Content-Encoding": "gzip"})


@router.get("/playground/{name}", include_in_schema=False)
async def part(name: str, request: Request) -> Response:
    """Return one of the files that the page loads."""
    if name not in TYPES or name == PAGE:
        return json_response({"error": {"message": "there is no such file", "type": "not_found"}}, 404)
    return answer(request, name)
