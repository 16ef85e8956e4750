"""The clients of the service, over HTTP or gRPC. They need neither torch nor Ray."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import update_wrapper
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.console import Console

from encoder_service.client.dataset import DatasetOptions, Samples, Written, encode_dataset
from encoder_service.client.items import (
    Embedding,
    File,
    Frames,
    Input,
    Plan,
    ProcessorOptions,
    ServiceError,
    Source,
    Text,
    Video,
    embedding_input,
    given,
    read_items,
    read_plans,
    read_vectors,
    request_item,
)
from encoder_service.client.transports import connect

if TYPE_CHECKING:
    from encoder_service.client.direct import DirectRows

LONGEST_BACKOFF_SECONDS = 5.0
"""Maximum wait between attempts if the service does not say how long to wait."""
GRACE_SECONDS = 1.0
"""Added to the first attempt, so that the transport's timeout, whose error says more, fires
first."""
Arguments = ParamSpec("Arguments")
Given = TypeVar("Given")
Result = TypeVar("Result")


class AsyncClient:
    """Calls the service from one event loop. Safe to share among its tasks."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_seconds: float = 60,
        retries: int = 4,
        *,
        direct: bool = False,
    ) -> None:
        """`url`: http://, https://, grpc:// or grpcs:// with host and port.

        A call takes at most `timeout_seconds`, from its start to the last byte of the answer.
        Within that time, errors that the service marks retryable are retried up to `retries` times,
        after the wait that the service asks for.

        With `direct`, the rows of `encode` come from the encoders' own ports, if this machine can
        reach them. Until they have arrived, they count towards the encoders' references.max_bytes.
        """
        self.transport = connect(url, token, timeout_seconds)
        self.direct: DirectRows | None = None
        if direct:  # only here, because other clients need nothing from actors
            from encoder_service.client.direct import DirectRows

            self.direct = DirectRows(self.transport)
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
        **options: Unpack[ProcessorOptions],
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
        **options: Unpack[ProcessorOptions],
    ) -> list[Embedding | ServiceError]: ...
    async def encode(
        self,
        sources: Sequence[Source],
        dtype: str = "bfloat16",
        on_error: Literal["fail", "return"] = "fail",
        *,
        reference: bool = False,
        evs_rate: float = 0.0,
        **options: Unpack[ProcessorOptions],
    ) -> list[Embedding] | list[Embedding | ServiceError]:
        """Returns an embedding for each source, in order.

        Raises ServiceError, OSError for a path that cannot be read, and TypeError for one source
        instead of a list or for something that is not a source, such as an array. With on_error
        "return", an item's error takes the place of its embedding.

        `dtype`: bfloat16, float16, float32 or float8_e4m3. float8_e4m3 takes half the bytes of
        bfloat16 but has a larger error (docs/api.md). The methods `numpy` and `torch` of an
        Embedding widen it.

        With `reference`, the service keeps the embeddings for a while and sends only their ids,
        for `fetch`. `evs_rate`: the share of each video's rows that is dropped where little
        changes from frame to frame. `options` apply to every source whose kind takes them, unless
        it is an Input with its own.
        """
        items = await read_all(sources, request_item, "encode")
        sent = {
            "dtype": dtype,
            "on_error": on_error,
            "reference": reference,
            "evs_rate": evs_rate,
        }
        sent |= given(options, *sent)
        encode = (self.direct or self.transport).encode
        document = await self.persist(lambda: encode(items, sent))
        return read_items(document, len(items))

    @overload
    async def plan(
        self,
        sources: Sequence[Source],
        on_error: Literal["fail"] = ...,
        *,
        evs_rate: float = ...,
        **options: Unpack[ProcessorOptions],
    ) -> list[Plan]: ...
    @overload
    async def plan(
        self,
        sources: Sequence[Source],
        on_error: Literal["return"],
        *,
        evs_rate: float = ...,
        **options: Unpack[ProcessorOptions],
    ) -> list[Plan | ServiceError]: ...
    async def plan(
        self,
        sources: Sequence[Source],
        on_error: Literal["fail", "return"] = "fail",
        *,
        evs_rate: float = 0.0,
        **options: Unpack[ProcessorOptions],
    ) -> list[Plan] | list[Plan | ServiceError]:
        """Returns what each source would cost, in order, without encoding it. See `encode`."""
        items = await read_all(sources, request_item, "plan")
        sent: dict[str, Any] = {"on_error": on_error, "evs_rate": evs_rate}
        sent |= given(options, *sent)
        document = await self.persist(lambda: self.transport.plan(items, sent))
        return read_plans(document, len(items))

    async def embed(
        self, sources: Sequence[File | Text], dimensions: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Returns a vector of length 1 for each image or Text: float32 [sources, dimensions].

        Only over HTTP, for services with `model.output: vector`. `dimensions`: how many leading
        values of each vector to return; None: all. Raises as `encode` does, and TypeError for
        videos.
        """
        inputs = await read_all(sources, embedding_input, "embed")
        sent = {"input": inputs, "encoding_format": "base64", "dimensions": dimensions}
        return read_vectors(await self.persist(lambda: self.transport.embed(sent)))

    async def encode_dataset(
        self,
        given: Samples,
        out: Path,
        options: DatasetOptions | None = None,
        console: Console | None = None,
    ) -> Written:
        """Encodes a folder, files, or rows with images into shards and a manifest under `out`.

        Memory does not grow with the dataset. Items that the service rejects, that time out or that
        cannot be read are recorded in the manifest. Finished items are on disk after a minute, and
        when the call is cancelled or fails. Calling it again continues after the last complete
        shard, and retries failed items that may work now. Raises ServiceError, OSError, or
        ValueError if `out` belongs to another dataset or another run is writing there.
        """
        return await encode_dataset(self, given, out, options or DatasetOptions(), console)

    async def fetch(self, reference: str) -> Embedding:
        """Returns the embedding kept under an id. Raises ServiceError "not_found" if it expired."""
        (found,) = read_items(await self.persist(lambda: self.transport.fetch(reference)), 1)
        assert isinstance(found, Embedding)
        return found

    async def release(self, reference: str) -> None:
        """Releases the embedding kept under an id. Raises ServiceError."""
        await self.persist(lambda: self.transport.release(reference))

    async def model(self) -> dict[str, Any]:
        """Returns what is served: model, budgets, limits, versions. Raises ServiceError."""
        return await self.persist(self.transport.model)

    async def ready(self) -> bool:
        """Whether the service can encode now; False if nothing answers in time."""
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return await self.transport.ready()
        except TimeoutError:
            return False

    async def close(self) -> None:
        if self.direct:
            self.direct.close()
        await self.transport.close()

    async def persist(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Makes the call, and repeats it while its error is retryable and time is left."""
        end = time.monotonic() + self.timeout_seconds
        for attempt in range(self.retries + 1):
            left = max(0.0, end - time.monotonic()) + (0 if attempt else GRACE_SECONDS)
            try:
                async with asyncio.timeout(left):
                    return await call()
            except TimeoutError:
                attempts = f"{attempt + 1} attempts" if attempt else "one attempt"
                message = f"no complete response within {self.timeout_seconds:g} s and {attempts}"
                raise ServiceError("deadline_exceeded", message) from None
            except ServiceError as error:
                backoff = min(0.1 * 2**attempt, LONGEST_BACKOFF_SECONDS)
                # Jitter, so that clients rejected together do not come back together.
                wait = (error.retry_after_seconds or backoff) * random.uniform(1, 1.25)
                late = time.monotonic() + wait > end
                if not error.retryable or late or attempt == self.retries:
                    raise
            await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


async def read_all(
    sources: Sequence[Given], read: Callable[[Given], Result], method: str
) -> list[Result]:
    """Reads what is sent for the sources. Raises OSError, and TypeError for one source instead of
    a list."""
    single = isinstance(sources, str | Path | bytes | Image.Image | Video | Frames | Input | Text)
    if single or not isinstance(sources, Iterable):
        one = type(sources).__name__
        raise TypeError(f"{method} takes a list, not one {one}: {method}([source])")
    return await asyncio.to_thread(lambda: [read(source) for source in sources])


def blocking(
    method: Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Client, Arguments], Result]:
    """The method of AsyncClient as one of Client, with its signature and documentation."""

    def call(self: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self.run(method(self.client, *args, **kwargs))

    update_wrapper(call, method)
    return call


class Client:
    """AsyncClient for code without an event loop, and for notebooks. Its loop runs in a thread.

        with Client("http://localhost:8000") as client:
            for embedding in client.encode(["cat.jpg", "dog.png"]):
                print(embedding.grid_thw, embedding.numpy().shape)

    Takes the same arguments. Safe to share among threads.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_seconds: float = 60,
        retries: int = 4,
        *,
        direct: bool = False,
    ) -> None:
        self.calls: set[asyncio.Task[Any]] = set()
        self.closed = False
        self.lock = threading.Lock()
        """Held while a call begins: `close` cancels all calls that began, and no others begin."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(ignore_unclosed)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def connected() -> AsyncClient:
            return AsyncClient(url, token, timeout_seconds, retries, direct=direct)

        try:
            self.client = self.run(connected())
        except BaseException:
            self.stop()
            raise

    encode = blocking(AsyncClient.encode)
    plan = blocking(AsyncClient.plan)
    embed = blocking(AsyncClient.embed)
    encode_dataset = blocking(AsyncClient.encode_dataset)
    fetch = blocking(AsyncClient.fetch)
    release = blocking(AsyncClient.release)
    model = blocking(AsyncClient.model)
    ready = blocking(AsyncClient.ready)

    def close(self) -> None:
        """Cancels calls of other threads, which raise RuntimeError, and waits until they ended."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            ended = asyncio.run_coroutine_threadsafe(self.end(), self.loop)
        ended.result()
        self.stop()

    async def end(self) -> None:
        calls = list(self.calls)
        for call in calls:
            if not call.cancelling():  # such as a dataset that was interrupted, and still writes
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.client.close()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        with self.lock:
            if self.closed:
                call.close()
                raise RuntimeError("the client is closed")
            under_way = asyncio.run_coroutine_threadsafe(self.begin(call), self.loop)
        try:
            return under_way.result()
        except CancelledError:
            raise RuntimeError("the client was closed before the call was complete") from None
        except BaseException:  # also KeyboardInterrupt, which the other thread does not see
            under_way.cancel()
            raise

    async def begin(self, call: Coroutine[Any, Any, Result]) -> Result:
        if task := asyncio.current_task():
            self.calls.add(task)
            task.add_done_callback(self.calls.discard)
        return await call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def ignore_unclosed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of an event loop. Ignores a Client that is dropped without close()."""
    if not {"client_session", "connector"} & context.keys():
        loop.default_exception_handler(context)
