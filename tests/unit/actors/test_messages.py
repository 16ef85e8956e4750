"""Messages over a socket: who may send them, and how long they may be."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import pytest

from actors.messages import LENGTH, MOST_BYTES, Messages, connect, listen


def test_a_length_that_none_of_ours_has_ends_it() -> None:
    end = Messages(lambda message: None, lambda: None)
    end.data_received(LENGTH.pack(MOST_BYTES))
    with pytest.raises(ValueError, match="not one of ours"):
        Messages(lambda message: None, lambda: None).data_received(LENGTH.pack(MOST_BYTES + 1))


def test_who_listens_hangs_up_on_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        heard: list[bytes] = []
        listening, address = listen()
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: Messages(heard.append, lambda: None), sock=listening
        )
        connecting = connect(address)
        assert connecting
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_unix_connection(sock=connecting)
            writer.write(LENGTH.pack(1) + b"x")
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        server.close()
        assert not heard

    asyncio.run(test())
