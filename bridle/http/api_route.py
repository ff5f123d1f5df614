"""Routes that return errors in the format of their own API. Errors outside of routes, such as unknown keys and wrong
methods, use the format of the API that has the path."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from bridle.errors import BridleError
from bridle.http import errors
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.state import json_response

Body = TypeVar("Body", bound=BaseModel)


def checked_body(kind: type[Body], fields: Any) -> Body:
    """Validate a body that a route has read itself, as FastAPI would. Raises `RequestValidationError`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


class ApiRoute(BoundedRoute):
    """Base class of routes with their own format of errors. `schema` is the JSON schema of error bodies."""

    schema: ClassVar[dict[str, Any]]

    @staticmethod
    def shape(error: BridleError, status: int) -> dict[str, Any]:
        """Return the JSON body of an error."""
        raise NotImplementedError

    @staticmethod
    def status(usual: int) -> int:
        """Return the HTTP status that this API uses instead of `usual`."""
        return usual

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def shaped(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return self._answer(request, errors.describe_validation(error.errors()))
            except errors.RefusedBody as error:
                return self._answer(request, error.error, error.status_code)
            except BridleError as error:
                return self._answer(request, error)

        return shaped

    def _answer(self, request: Request, error: BridleError, status: int | None = None) -> Response:
        errors.note_error(request, error)
        status = status or self.status(errors.status_of(error)[0])
        response = json_response(self.shape(error, status), status, errors.retry_headers(error))
        if status in (408, 413, 415):  # do not read the rest of the body
            response.headers["connection"] = "close"
        return response


def refusing_for(routers: Iterable[APIRouter]) -> errors.Refuse:
    """Return a function that answers errors at or below the paths of `routers`, in the format of their API."""
    kinds = {route.path: type(route) for router in routers for route in router.routes if isinstance(route, ApiRoute)}

    def refuse(path: str, error: BridleError, status: int | None = None) -> Response:
        kind = kinds.get(path)
        while kind is None and path.rstrip("/"):
            path = path.rstrip("/").rpartition("/")[0]
            kind = kinds.get(path)
        if kind is None:
            return errors.refuse_plainly(path, error, status)
        status = status or kind.status(errors.status_of(error)[0])
        return json_response(kind.shape(error, status), status, errors.retry_headers(error))

    return refuse
