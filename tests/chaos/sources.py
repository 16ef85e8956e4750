"""The three ways to ask a service: over HTTP, over gRPC, and from within Ray, all alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from actors import errors
from actors.families.registry import read
from actors.store.writer import tensor
from actors.types import Embedding
from encoder_service.bench.cluster import Cluster
from encoder_service.client import Client, ServiceError
from encoder_service.client import Embedding as Received
from encoder_service.config import LimitOptions, ServiceOptions
from encoder_service.intake.media import probe
from router.here import encode_here

Rows = np.ndarray[Any, Any]
Encode = Callable[[Sequence[bytes]], list["Rows | str"]]
"""Rows of each file in float32, or the type of its error. Raises Failed for all of them."""
Source = Callable[[], AbstractContextManager[Encode]]

TIMEOUT_SECONDS = 120.0
BAD = b"not an image"


class Failed(Exception):
    """A request was not answered. `kind`: the error's type; `connection` where it was lost."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def sources(where: Cluster, options: ServiceOptions) -> list[Source]:
    """One for each caller."""
    urls = (where.http, where.http, where.grpc)
    return [*(partial(from_outside, url) for url in urls), partial(within_ray, options)]


@contextmanager
def from_outside(url: str, reference: bool = False) -> Iterator[Encode]:
    """By the client, which here tries nothing again. With `reference` it fetches rows by id."""
    with Client(url, retries=0, timeout_seconds=TIMEOUT_SECONDS) as client:

        def encode(files: Sequence[bytes]) -> list[Rows | str]:
            try:
                answers = client.encode(files, "float32", on_error="return", reference=reference)
                if reference:
                    answers = all_fetched(client, answers)
            except ServiceError as error:
                raise failed(error) from error
            return [
                each.type if isinstance(each, ServiceError) else each.numpy() for each in answers
            ]

        yield encode


def all_fetched(
    client: Client, kept: Sequence[Received | ServiceError]
) -> list[Received | ServiceError]:
    """The rows of ids, which the service then forgets, even if one cannot be fetched."""
    ids = [each.reference for each in kept if isinstance(each, Received)]
    try:
        rows = {each: client.fetch(each) for each in ids}
    except ServiceError as error:
        raise failed(error, "fetch: ") from error
    finally:
        for each in ids:
            with suppress(ServiceError):
                client.release(each)
    return [rows[each.reference] if isinstance(each, Received) else each for each in kept]


def failed(error: ServiceError, call: str = "") -> Failed:
    """Of a call of the client."""
    if error.type == "deadline_exceeded" and error.status is None:
        return Failed("never answered", str(error))
    # Over gRPC, UNAVAILABLE is a lost connection, or the service's answer that an id is lost.
    lost = error.status is None or (error.status == "UNAVAILABLE" and not call)
    return Failed("connection" if lost else call + error.type, str(error))


@contextmanager
def within_ray(options: ServiceOptions) -> Iterator[Encode]:
    """By a handle of the Router deployment. What is no image does not get as far as this."""
    spec = read(options.model)
    router = serve.get_deployment_handle("Router", "encoder")

    def encode(files: Sequence[bytes]) -> list[Rows | str]:
        media = [probe(file, "image", spec, LimitOptions()) for file in files if file != BAD]
        try:
            answers = asyncio.run(
                encode_here(router.encode.remote, media, "float32", TIMEOUT_SECONDS)
            )
        except (RayActorError, DeploymentUnavailableError) as error:
            raise Failed("connection", str(error)) from error
        except errors.ServiceError as error:
            raise Failed(type(error).__name__, error.message) from error
        left = iter(answers)
        return ["invalid_media" if file == BAD else rows(next(left)) for file in files]

    yield encode


def rows(answer: object) -> Rows | str:
    """Of an answer within Ray."""
    if isinstance(answer, Embedding):
        found: Rows = tensor(answer).numpy()
        return found
    return type(answer).__name__
