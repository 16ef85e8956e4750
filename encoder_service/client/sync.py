"""A client of the service, over HTTP or gRPC.

    with Client("http://localhost:8000") as client:
        for embedding in client.encode(["cat.jpg", "dog.png"]):
            print(embedding.grid_thw, embedding.numpy().shape)

Needs neither torch nor ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from rich.console import Console

from encoder_service.client.async_ import AsyncClient
from encoder_service.client.dataset import DatasetOptions, Written
from encoder_service.client.embedding import Embedding, ServiceError
from encoder_service.client.samples import Samples, Source

Result = TypeVar("Result")


class Client:
    """The same for code without an event loop, or in a notebook: one runs in a thread of its own.

    Safe to share among threads.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_seconds: float = 60,
        retries: int = 4,
    ) -> None:
        """See AsyncClient."""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def connected() -> AsyncClient:
            return AsyncClient(url, token, timeout_seconds, retries)

        try:
            self.client = self.run(connected())
        except BaseException:
            self.stop()
            raise

    @overload
    def encode(
        self,
        sources: Sequence[Source],
        dtype: str = ...,
        on_error: Literal["fail"] = ...,
        *,
        reference: bool = ...,
        evs_rate: float = ...,
    ) -> list[Embedding]: ...
    @overload
    def encode(
        self,
        sources: Sequence[Source],
        dtype: str = ...,
        *,
        on_error: Literal["return"],
        reference: bool = ...,
        evs_rate: float = ...,
    ) -> list[Embedding | ServiceError]: ...
    def encode(
        self,
        sources: Sequence[Source],
        dtype: str = "bfloat16",
        on_error: Literal["fail", "return"] = "fail",
        *,
        reference: bool = False,
        evs_rate: float = 0.0,
    ) -> list[Embedding] | list[Embedding | ServiceError]:
        """See AsyncClient."""
        call: Any = self.client.encode  # the overloads take one of the two words, not either
        embeddings: list[Embedding] = self.run(
            call(sources, dtype, on_error=on_error, reference=reference, evs_rate=evs_rate)
        )
        return embeddings

    def encode_dataset(
        self,
        given: Samples,
        out: Path,
        options: DatasetOptions | None = None,
        console: Console | None = None,
    ) -> Written:
        """See AsyncClient."""
        return self.run(self.client.encode_dataset(given, out, options, console))

    def fetch(self, reference: str) -> Embedding:
        """See AsyncClient."""
        return self.run(self.client.fetch(reference))

    def release(self, reference: str) -> None:
        """See AsyncClient."""
        self.run(self.client.release(reference))

    def model(self) -> dict[str, Any]:
        """See AsyncClient."""
        return self.run(self.client.model())

    def ready(self) -> bool:
        """See AsyncClient."""
        return self.run(self.client.ready())

    def close(self) -> None:
        """Gives the connections back and ends the thread."""
        if self.loop.is_closed():
            return
        self.run(self.client.close())
        self.stop()

    def stop(self) -> None:
        """Ends the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """The result of a call in the other thread."""
        under_way = asyncio.run_coroutine_threadsafe(call, self.loop)
        try:
            return under_way.result()
        except BaseException:  # also Ctrl-C, which the other thread does not see
            under_way.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
