"""The errors of the simulated model, in OpenAI's shape: a client then sees that they are the model's, not its gateway's."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.openai_error import JSON, openai_error


class BadRequest(ValueError):
    """A request that has no answer.

    Attributes:
        param: The field at fault, if it is one.
        status: HTTP status.
        code: OpenAI's name of the fault, if it has one.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def response(self) -> Response:
        """Return the answer that says so."""
        body = openai_error(str(self), "invalid_request_error", param=self.param, code=self.code)
        return Response(body, self.status, media_type=JSON)


def failure(status: int) -> Response:
    """Return a failure that the settings ask for."""
    return Response(openai_error("a failure that the settings ask for (failure_rate)", "server_error"), status, media_type=JSON)


def unknown(request: Request, error: HTTPException, routes: Sequence[Route]) -> Response:
    """Return the answer to a path that there is not, or not by that method: names those that there are."""
    known = ", ".join(f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {route.path}" for route in routes)
    told = f"the simulated model (cachepilot llm-sim) has no {request.method} {request.url.path}; it has {known}"
    code = "not_found" if error.status_code == 404 else "method_not_supported"
    answer = BadRequest(told, status=error.status_code, code=code).response()
    answer.headers.update(error.headers or {})
    return answer
