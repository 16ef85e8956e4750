"""What a request may say and what a response says: the words of the API, and its OpenAPI document.

Knows nothing of transport. Items of a request are `wire.RequestItem`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.errors import InvalidOption
from actors.types import Dtype, Grid, Kind, Source


class RequestOptions(BaseModel):
    """`options` of a request. One that is not here is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Dtype = "bfloat16"
    timeout_s: float | None = Field(
        None, gt=0, strict=True, description="None: the service's default."
    )
    on_error: Literal["fail", "return"] = Field(
        "fail", description="fail: the first error is the answer; return: it stands in its item."
    )
    evs_rate: float = Field(
        0.0,
        ge=0,
        lt=1,
        strict=True,
        description="The share of each video's rows that is left out after encoding, where little "
        "changes from one group of frames to the next; images keep theirs.",
    )
    reference: bool = Field(
        False,
        strict=True,
        description="Keep the embeddings for a while, and answer with ids to fetch them by.",
    )
    encoding: Literal["base64", "float"] | None = Field(
        None, description="Of the tensors of a JSON response, base64 if not given."
    )


class ErrorBody(BaseModel):
    """An error, of the request or of one item."""

    type: str
    message: str
    item: int | None
    retryable: bool


class ErrorDocument(BaseModel):
    """The body of every response that is not 2xx."""

    error: ErrorBody


class ItemDocument(BaseModel):
    """One item's embedding."""

    index: int
    type: Kind
    grid_thw: Grid = Field(
        description="Temporal groups, rows, columns, in patches. Models that cut tiles: "
        "those of the tiles side by side, without the one that shows the whole image."
    )
    tokens: int
    dtype: Dtype
    shape: tuple[int, int] = Field(description="Tokens, width.")
    data: str | None = Field(
        None,
        description="Row-major, little-endian; base64 in JSON, bytes in msgpack. "
        "Not there with `reference`.",
    )
    reference: str | None = Field(None, description="Id for GET /v1/embeddings/{id}.")
    digest: str = Field(description="SHA-256 of the item's bytes.")
    source: Source
    deepstack: int = Field(description="Deepstack features that follow the main ones in a row.")
    notice: str | None = None
    timestamps: list[float] | None = Field(
        None, description="Of a video: seconds of each temporal group, as its model reckons them."
    )
    second_per_grid_ts: float | None = Field(
        None, description="Of a video: seconds from one temporal group to the next."
    )
    frame_tokens: list[int] | None = Field(
        None, description="With `evs_rate`: rows that are left of each temporal group."
    )


class FailedItem(BaseModel):
    """What stands in an item's place with `on_error: return`."""

    index: int
    type: Kind
    error: ErrorBody


class Timings(BaseModel):
    """Milliseconds; all but the total are the largest over the items."""

    queue_ms: float
    preprocess_ms: float
    encode_ms: float
    total_ms: float


class EncodeDocument(BaseModel):
    """The answer to POST /v1/encode."""

    model: str
    family: str = Field(description="Of the model, such as qwen3_vl: how its rows are to be read.")
    weights: Literal["checkpoint", "dummy"]
    items: list[ItemDocument | FailedItem]
    timings: Timings


class BodyItem(BaseModel):
    """An item of a JSON or msgpack request: `data`, `url` or `frames`."""

    type: Kind = "image"
    data: str | None = Field(None, description="base64 in JSON, bytes in msgpack.")
    url: str | None = Field(None, description="Refused unless the service allows the host.")
    frames: list[str] | None = Field(
        None, description="A video as image files of one size, all of which are encoded."
    )
    fps: float | None = Field(
        None,
        gt=0,
        description="How many of `frames` are shown in a second; as many as the model samples.",
    )


class EncodeBody(BaseModel):
    """The body of POST /v1/encode in JSON or msgpack."""

    items: list[BodyItem] = Field(min_length=1)
    options: RequestOptions = RequestOptions()


def request_options(values: dict[str, Any]) -> RequestOptions:
    """The options of a request. Raises InvalidOption, which names every offending one."""
    try:
        return RequestOptions.model_validate(values)
    except ValidationError as error:
        known = ", ".join(RequestOptions.model_fields)
        problems = (
            f"options.{'.'.join(map(str, problem['loc']))}: "
            + (f"unknown; known are {known}" if unknown(problem["type"]) else problem["msg"])
            for problem in error.errors()
        )
        raise InvalidOption("; ".join(problems)) from None


def unknown(problem: str) -> bool:
    """Whether pydantic complains of a key rather than of a value."""
    return problem == "extra_forbidden"
