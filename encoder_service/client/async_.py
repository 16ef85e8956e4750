"""The client, for code with an event loop. The same for code without one: client.py."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from io import BytesIO
from mimetypes import guess_type
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from PIL import Image
from rich.console import Console

from encoder_service.client.dataset import DatasetOptions, Written, encode_dataset
from encoder_service.client.embedding import Embedding, ServiceError, read_items
from encoder_service.client.samples import File, Frames, Samples, Source
from encoder_service.client.transports import Transport, connect
from encoder_service.intake.signatures import VIDEOS, name_format
from encoder_service.wire.documents import RequestItem

LONGEST_BACKOFF_SECONDS = 5.0
"""Between attempts, where the service does not say how long."""
GRACE_SECONDS = 1.0
"""A first attempt ends so much later: where the transport gave up, it says of what kind it was."""
IN_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
CONVERTED = {
    **dict.fromkeys(("CMYK", "YCbCr", "HSV", "LAB", "RGBX"), "RGB"),
    **{"RGBa": "RGBA", "PA": "RGBA", "La": "LA"},
}
"""Pillow's modes that change on their way: printers' JPEGs are in many datasets."""
Result = TypeVar("Result")


class AsyncClient:
    """For one event loop. Safe to share among its tasks."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_seconds: float = 60,
        retries: int = 4,
        transport: Transport | None = None,
    ) -> None:
        """`url`: http://, https://, grpc:// or grpcs:// with host and port.

        A call takes `timeout_seconds` at most, the last byte of its answer included. What the
        service calls retryable is tried again within them, up to `retries` times, waiting as long
        as the service asks.
        """
        self.transport = transport or connect(url, token, timeout_seconds)
        self.timeout_seconds = timeout_seconds
        self.retries = retries

    @overload
    async def encode(
        self,
        sources: Sequence[Source],
        dtype: str = ...,
        on_error: Literal["fail"] = ...,
        *,
        reference: bool = ...,
        evs_rate: float = ...,
    ) -> list[Embedding]: ...
    @overload
    async def encode(
        self,
        sources: Sequence[Source],
        dtype: str = ...,
        *,
        on_error: Literal["return"],
        reference: bool = ...,
        evs_rate: float = ...,
    ) -> list[Embedding | ServiceError]: ...
    async def encode(
        self,
        sources: Sequence[Source],
        dtype: str = "bfloat16",
        on_error: Literal["fail", "return"] = "fail",
        *,
        reference: bool = False,
        evs_rate: float = 0.0,
    ) -> list[Embedding] | list[Embedding | ServiceError]:
        """An embedding for each source, in order.

        Raises ServiceError, OSError for a path, TypeError for one source in place of a list.

        With on_error "return" the error of an item stands in its place. With `reference` the
        service keeps the embeddings for a while: they come without data, for `fetch`. `evs_rate`:
        the share of each video's rows that is left out where little changes.
        """
        check_list(sources)
        items = await asyncio.to_thread(lambda: [request_item(source) for source in sources])
        options = {
            **{"dtype": dtype, "on_error": on_error},
            **{"reference": reference, "evs_rate": evs_rate},
        }
        document = await self.persist(lambda: self.transport.encode(items, options))
        return read_items(document)

    async def encode_dataset(
        self,
        given: Samples,
        out: Path,
        options: DatasetOptions | None = None,
        console: Console | None = None,
    ) -> Written:
        """Encodes a folder, files, or rows with images into shards and a manifest under `out`.

        Streams: memory does not grow with the dataset. An item that the service refuses, that
        runs out of time or cannot be read is recorded in the manifest. Any other failure is raised
        (ServiceError, OSError, ValueError for another dataset than before, or while another run
        writes there). The same call goes on where it ended, and tries again what may work now.
        `console`: shows a progress bar.
        """
        return await encode_dataset(self, given, out, options or DatasetOptions(), console)

    async def fetch(self, reference: str) -> Embedding:
        """What the service keeps. Raises ServiceError: "not_found" when its time is over."""
        (found,) = read_items(await self.persist(lambda: self.transport.fetch(reference)))
        assert isinstance(found, Embedding)
        return found

    async def release(self, reference: str) -> None:
        """Lets the service let go of it. Raises ServiceError."""
        await self.persist(lambda: self.transport.release(reference))

    async def model(self) -> dict[str, Any]:
        """What is served: spec, budgets, limits, versions."""
        return await self.persist(self.transport.model)

    async def ready(self) -> bool:
        """Whether the service would encode now. False also when nobody answers in time."""
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return await self.transport.ready()
        except TimeoutError:
            return False

    async def close(self) -> None:
        """Gives the connections back."""
        await self.transport.close()

    async def persist(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """The result, after as many attempts as are worth it."""
        end = time.monotonic() + self.timeout_seconds
        for attempt in range(self.retries + 1):
            left = max(0.0, end - time.monotonic()) + (0 if attempt else GRACE_SECONDS)
            try:
                async with asyncio.timeout(left):
                    return await call()
            except TimeoutError:
                attempts = f"{attempt + 1} attempts" if attempt else "one attempt"
                message = f"no whole answer within {self.timeout_seconds:g} s and {attempts}"
                raise ServiceError("deadline_exceeded", message) from None
            except ServiceError as error:
                backoff = min(0.1 * 2**attempt, LONGEST_BACKOFF_SECONDS)
                # Apart from each other, so that clients refused together do not return together.
                wait = (error.retry_after_seconds or backoff) * random.uniform(1, 1.25)
                late = time.monotonic() + wait > end
                if not error.retryable or late or attempt == self.retries:
                    raise
            await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def check_list(sources: object) -> None:
    """Raises TypeError for one source: the letters of a path are no paths."""
    if isinstance(sources, File | Frames):
        raise TypeError(f"encode takes a list, not one {type(sources).__name__}: encode([source])")


def request_item(source: Source) -> RequestItem:
    """What is sent for a source. Raises OSError."""
    if isinstance(source, Frames):
        files = tuple(request_item(image).data or b"" for image in source.images)
        return RequestItem("video", frames=files, fps=source.fps)
    if isinstance(source, bytes):
        return RequestItem("video" if name_format(source) in VIDEOS else "image", source)
    if isinstance(source, Image.Image):
        return RequestItem("image", png(source))
    name = str(source)
    kind: Literal["image", "video"] = (
        "video" if (guess_type(name)[0] or "").startswith("video/") else "image"
    )
    if name.startswith("http://"):
        raise OSError(f"{name}: of URLs only https is taken")
    if name.startswith("https://"):
        return RequestItem(kind, url=name)
    return RequestItem(kind, Path(name).read_bytes())


def png(image: Image.Image) -> bytes:
    """The file. Raises OSError for a mode whose values may be anything: no colour is known."""
    if image.mode not in IN_PNG:
        if image.mode not in CONVERTED:
            raise OSError(
                f"an image of mode {image.mode}: what its values mean is not known; scale them to "
                "0 to 255 and convert it to L or RGB"
            )
        image = image.convert(CONVERTED[image.mode])
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
