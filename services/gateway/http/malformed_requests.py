"""Answers malformed HTTP, such as a header that is too long, in the shape of the OpenAI API."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import _ErrInfo

from services.gateway.http.error_responses import http_error_response, shortened

log = logging.getLogger(__name__)


class FaultHandler(web.RequestHandler):
    """One connection. Knows no limits."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Raises a fault inside a body, such as a malformed chunk, in the handler that reads the body.

        aiohttp answers the fault after that request has ended, which it never does by itself.
        """
        super().data_received(data)
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            body = self._unfinished_body()
            if body is not None:
                self._messages.pop()  # the request with this body is the one to answer
                self.close()
                body.set_exception(web.RequestPayloadError("the body is not valid HTTP"))
                body.feed_eof()

    def _unfinished_body(self) -> StreamReader | None:
        """The body of the last request before the fault, if it is still being read."""
        body: StreamReader | None = None
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        elif self._current_request is not None:
            body = self._current_request.content
        return None if body is None or body.is_eof() else body

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response, after which the connection is closed."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        log.info("http.fault", extra={"status": status, "reason": shortened(str(message))})
        if request.writer.output_size > 0:
            raise ConnectionError("part of another response is out already")
        response = http_error_response(_Fault(text=_message(exc)))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends the response. What aiohttp refuses before the application sees it, such as Expect, gets our shape."""
        if isinstance(resp, web.HTTPException):
            resp = http_error_response(resp)
        return await super().finish_response(request, resp, start_time)


class _Fault(web.HTTPBadRequest):
    """A fault whose text is shown to the client."""


def _message(error: BaseException | None) -> str:
    if isinstance(error, LineTooLong):
        return "the request line or a header is longer than --max-header-bytes allows"
    if "header" in str(error).lower():
        return "the headers are not valid HTTP, or more than --max-headers allows"
    return "this is not a valid HTTP request"
