"""OpenAI's embeddings API: one vector per image or text, for models that return vectors.

Images and texts are items like those of /v1/encode, so that one call of the router encodes both.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from actors.errors import EncodeFailed, InvalidRequest, ServiceError
from actors.spec.model_spec import ModelSpec
from actors.types import Embedding, Media
from encoder_service.api.answer import check_size
from encoder_service.api.errors import AtItem
from encoder_service.api.http import EMBEDDINGS_PATH, written
from encoder_service.api.schema import ERRORS, ErrorDocument, RequestOptions, schema
from encoder_service.api.upload import check_length, read_body
from encoder_service.config import LimitOptions
from encoder_service.intake.limits import Deadline, Take, check_items, offload
from encoder_service.llm.calls import StrictModel
from encoder_service.llm.http import MOST_CHARACTERS_A_TOKEN, MOST_VALUES, refusal
from encoder_service.llm.schema import (
    ImagePart,
    InvalidKey,
    TextPart,
    UnknownModel,
    invalid,
    item,
)
from encoder_service.ops.exchange import Exchange
from encoder_service.service import Service
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import JSON, Piece, WireError, read_json

IMAGE_URL = re.compile(r"data:image/|https?://\S++\Z", re.IGNORECASE)

FLOAT_CHARACTERS = 20
"""Approximate length of a value in JSON."""

Vector = npt.NDArray[np.float32]


def as_inputs(given: Any) -> Any:
    """Converts OpenAI's `input`, a text or a list of texts, to parts. A text that matches IMAGE_URL
    is an image."""
    return [as_part(one) for one in (given if isinstance(given, list) else [given])]


def as_part(one: Any) -> Any:
    if isinstance(one, int | list):
        raise ValueError(
            "token ids are not supported: send the text itself "
            "(LangChain: check_embedding_ctx_length=False)"
        )
    if not isinstance(one, str):
        return one
    if IMAGE_URL.match(one):
        return {"type": "image_url", "image_url": {"url": one}}
    return {"type": "text", "text": one}


InputPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class EmbeddingRequest(StrictModel):
    """The body of POST /v1/embeddings."""

    input: Annotated[
        list[InputPart],
        BeforeValidator(as_inputs, json_schema_input_type=str | list[str | InputPart]),
    ] = Field(min_length=1, fail_fast=True)
    """A string is an image if it begins with data:image/, or if it is one http:// or https:// URL
    without white space. Any other string is a text."""
    model: str | None = None
    """If given, it must be the model that is served."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64 encodes little-endian float32."""
    dimensions: int | None = Field(None, gt=0)
    """How many leading values of each vector to return, scaled to length 1 again."""
    user: str | None = None
    """Has no effect."""


class VectorDocument(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class UsageDocument(BaseModel):
    """Tokens of the inputs, including cached ones. A text counts as many as it is padded to."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsDocument(BaseModel):
    """The response of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[VectorDocument]
    model: str
    weights: Literal["checkpoint", "dummy"]
    usage: UsageDocument


def add(app: FastAPI, service: Service) -> None:
    """Adds the route. If the model returns rows, every request is rejected with a remedy."""
    app.state.bodies.append(EmbeddingRequest)
    body = {"required": True, "content": {JSON: schema(EmbeddingRequest)}}
    unknown = {"model": ErrorDocument, "description": "Another model is served."}
    responses = ERRORS | {200: {"model": EmbeddingsDocument}, 404: unknown}

    @app.post(EMBEDDINGS_PATH, openapi_extra={"requestBody": body}, responses=responses)
    async def embeddings(request: Request) -> Response:
        """Vectors of length 1 for images and texts, as in OpenAI's API."""
        exchange: Exchange = request.state.exchange
        try:
            service.authorize(*request.headers.getlist("authorization"))
            check_vector(service.spec)
            check_length(request, service.limits)
            service.backend.check_room()  # 413 before 429: retrying would not help
            service.unsent.check_room(1)
            with service.buffered.hold() as take:
                content = await read_body(request, service.limits, take)
                asked, images = await offload(
                    len(content), parse, content, service.spec, service.limits
                )
                vectors, tokens = await embed(service, asked, images, exchange, take)
            width = FLOAT_CHARACTERS if asked.encoding_format == "float" else 4
            write = partial(write_vectors, service.spec, asked, vectors, tokens)
            return await written(request, JSON, width * sum(map(len, vectors)), write)
        except ClientDisconnect:
            raise
        except Exception as problem:
            return refusal(problem, exchange, "input[{}]".format)


def check_vector(spec: ModelSpec) -> None:
    if not spec.vector:
        raise InvalidRequest(
            f"{spec.id} gives {spec.family} rows here, not one vector for each image: use "
            "POST /v1/encode, or serve a CLIP or SigLIP with `model.output: vector`"
        )


def parse(
    body: bytes, spec: ModelSpec, limits: LimitOptions
) -> tuple[EmbeddingRequest, dict[int, RequestItem]]:
    """Returns the request, and its images by position. Raises InvalidRequest, or UnknownModel."""
    try:
        found = read_json(body, MOST_VALUES)
        given = found.get("input")
        if isinstance(given, list) and not isinstance(next(iter(given), None), int | list):
            check_items(len(given), limits)  # before a million texts become parts
        asked = EmbeddingRequest.model_validate(found)
    except WireError as error:
        raise InvalidRequest(str(error)) from None
    except ValidationError as error:
        raise invalid(error) from None
    if asked.model not in (None, spec.id):
        raise UnknownModel(f"model {asked.model[:100]!r} is not served here; {spec.id!r} is")
    if asked.dimensions and asked.dimensions > spec.width:
        raise InvalidKey(
            f"dimensions: {asked.dimensions} is over {spec.width}, those of {spec.id}", "dimensions"
        )
    return asked, {
        place: item(f"input[{place}]", part)
        for place, part in enumerate(asked.input)
        if isinstance(part, ImagePart)
    }


async def embed(
    service: Service,
    asked: EmbeddingRequest,
    images: dict[int, RequestItem],
    exchange: Exchange,
    take: Take,
) -> tuple[list[Vector], int]:
    """Returns each input's vector as the model computes it, and the total tokens of the inputs.

    Raises ServiceError, or AtItem for the first input that failed.
    """
    deadline = Deadline(service.limits.timeout_seconds, "send less")
    admitted: Iterator[Media | ServiceError] = iter(())
    if images:
        admitted = iter(await deadline.keep(service.admission.admit([*images.values()], take)))
    media: list[Media] = []
    for place, part in enumerate(asked.input):
        one = text_media(part.text, service.spec) if isinstance(part, TextPart) else next(admitted)
        if isinstance(one, ServiceError):
            raise AtItem(place, one)
        media.append(one)
    exchange.admitted(media)
    options = RequestOptions(dtype="float32", encoding=asked.encoding_format)
    size_bytes = check_size(media, options, service.spec, service.limits, service.references)
    service.unsent.check_room(size_bytes)  # before encoding what could not be sent
    work = service.backend.encode(media, "float32", deadline.left(), reference=False)
    rows = []
    for place, answer in enumerate(await deadline.keep(work)):
        if isinstance(answer, ServiceError):
            raise AtItem(place, answer)
        rows.append(values(answer))
    return rows, sum(sum(one.plan.path_tokens) for one in media)


def text_media(text: str, spec: ModelSpec) -> Media | ServiceError:
    """Turns a text into an item. The encoder's replica tokenises it; it rejects one that is too
    long."""
    plan = spec.text_plan
    if plan is None:
        return InvalidRequest(f"{spec.id} has no text tower: send images, as data URLs or https")
    if not text.strip():
        return InvalidRequest("the text is empty: leave it out")
    if len(text) > MOST_CHARACTERS_A_TOKEN * plan.patches:
        return InvalidRequest(
            f"the text is {len(text)} characters; {spec.id} takes {plan.patches} tokens: shorten it"
        )
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return InvalidRequest("the text has an unpaired surrogate: send valid Unicode")
    return Media("text", data, plan, hashlib.sha256(data).hexdigest())


def values(answer: Embedding) -> Vector:
    assert isinstance(answer.data, np.ndarray), "an embedding not read yet. This is a bug."
    return answer.data.view("<f4")


def write_vectors(
    spec: ModelSpec, asked: EmbeddingRequest, vectors: Sequence[Vector], tokens: int
) -> list[Piece]:
    """Builds the response one vector at a time, so that no call holds the GIL for long.

    Raises AtItem for a vector with NaN or infinity.
    """
    head = {
        "object": "list",
        "model": spec.id,
        "weights": spec.weights,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    data = []
    for index, vector in enumerate(vectors):
        if not np.isfinite(vector).all():
            problem = "the model gave NaN or infinity for this input: report it with the input"
            raise AtItem(index, EncodeFailed(problem))
        one = unit(vector[: asked.dimensions])
        base64 = asked.encoding_format == "base64"
        shown = b64encode(one.tobytes()).decode() if base64 else one.tolist()
        entry = {"object": "embedding", "index": index, "embedding": shown}
        data.append(json.dumps(entry).encode())
    return [b"".join([json.dumps(head).encode()[:-1], b', "data": [', b", ".join(data), b"]}"])]


def unit(vector: Vector) -> Vector:
    """Scales a vector to length 1. A vector of zeros stays as it is."""
    scaled: Vector = vector / max(np.linalg.norm(vector), np.finfo(np.float32).tiny)
    return scaled
