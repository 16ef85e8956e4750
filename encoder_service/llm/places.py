"""Where encoders serve the rows of an id, for vLLM's processes.

vLLM's EC connector asks a front door for it (`PLACE_PATH`). Inside the service it asks the Chat
replica that started vLLM, because vLLM's processes have neither Ray nor a client's token.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from hmac import compare_digest
from secrets import token_urlsafe

from aiohttp import web

from actors.errors import NotFound
from actors.rows.protocol import RowsPlace
from encoder_service.api.http import PLACE_PATH

log = logging.getLogger("ray.serve")


class PlaceServer:
    """An HTTP server on 127.0.0.1, in the running event loop, until the process exits. It answers
    only after vLLM has started, because that blocks the loop. Not uvicorn, which would handle the
    process's signals."""

    def __init__(self, rows_place: Callable[[str], Awaitable[RowsPlace]]) -> None:
        """`rows_place`: Router.place of a handle."""
        self.token = token_urlsafe()
        self._rows_place = rows_place
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = web.Application()
        app.router.add_get(PLACE_PATH, self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    def check(self) -> None:
        """Raises the error with which it could not start."""
        if self._starting.done():
            self._starting.result()

    async def _answer(self, request: web.Request) -> web.Response:
        given = request.headers.get("authorization", "").encode()
        if not compare_digest(given, f"Bearer {self.token}".encode()):
            return web.Response(status=401)
        try:
            place = await self._rows_place(request.match_info["reference"])
        except Exception as error:  # of the router, or of Ray
            log.warning("the rows of an id cannot be located: %s", error)
            found = isinstance(getattr(error, "cause", error), NotFound)
            return web.Response(status=404 if found else 503, text=str(error))
        return web.json_response(asdict(place))
