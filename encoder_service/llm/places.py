"""Where encoders serve the rows of an id, for vLLM's processes.

vLLM's EC connector asks a front door for it (`PLACE_PATH`). Inside the service it asks the Chat
replica that started vLLM, because vLLM's processes have neither Ray nor a client's token.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from hmac import compare_digest
from secrets import token_urlsafe
from threading import Thread

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from actors.rows.protocol import RowsPlace
from encoder_service.api.http import PLACE_PATH

log = logging.getLogger("ray.serve")


class PlaceServer:
    """An HTTP server on 127.0.0.1, in a thread of its own."""

    def __init__(self, rows_place: Callable[[str], Awaitable[RowsPlace]]) -> None:
        """`rows_place`: Router.rows_place of a handle."""
        self.token = token_urlsafe()
        self._rows_place = rows_place
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = Starlette(routes=[Route(PLACE_PATH, self._answer)])
        config = uvicorn.Config(
            app, loop="asyncio", lifespan="off", log_config=None, access_log=False
        )
        self._server = uvicorn.Server(config)
        Thread(target=self._server.run, args=([listening],), name="places", daemon=True).start()

    async def _answer(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not compare_digest(given, f"Bearer {self.token}".encode()):
            return Response(status_code=401)
        try:
            place = await self._rows_place(request.path_params["reference"])
        except Exception as error:  # of the router, or of Ray; the request fails, and is sent again
            log.warning("the rows of an id cannot be located: %s", error)
            return PlainTextResponse(str(error), status_code=404)
        return JSONResponse(asdict(place))

    def close(self) -> None:
        self._server.should_exit = True
