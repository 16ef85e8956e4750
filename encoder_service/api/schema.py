"""The options of a request, and the shapes of bodies for the OpenAPI document.

FastAPI cannot derive those shapes, because bodies are read and written by wire/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.errors import InvalidOption
from actors.types import Dtype, Grid, Kind, ProcessorKwargs, Source
from encoder_service.wire.documents import KWARGS, MOST_COUNT, check_option, short
from encoder_service.wire.formats import WireError


def without_default(shown: dict[str, Any]) -> None:
    """Removes a default that depends on the request, because generated clients would send it."""
    shown.pop("default", None)


OF_A_FILE = "For video files: "


class KwargsFields(BaseModel):
    """How items are sized and sampled, with options named as in transformers' processors.

    GET /v1/model shows under `processor_kwargs` which of these the model takes, their defaults and
    their largest values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_pixels: int | None = Field(
        None,
        gt=0,
        lt=MOST_COUNT,
        strict=True,
        description="Smaller images and video frames are enlarged to this many pixels.",
    )
    max_pixels: int | None = Field(
        None,
        gt=0,
        lt=MOST_COUNT,
        strict=True,
        description="Larger images and video frames are shrunk to this many pixels.",
    )
    max_patches: int | None = Field(
        None,
        gt=0,
        lt=MOST_COUNT,
        strict=True,
        description="For models that cut tiles: maximum tiles per image. For Kimi and SigLIP 2: "
        "maximum patches per image or frame.",
    )
    fps: float | None = Field(
        None,
        gt=0,
        lt=MOST_COUNT,
        strict=True,
        description=OF_A_FILE + "frames to sample per second.",
    )
    num_frames: int | None = Field(
        None,
        gt=0,
        lt=MOST_COUNT,
        strict=True,
        description=OF_A_FILE + "frames to sample, instead of `fps`.",
    )

    def kwargs(self) -> ProcessorKwargs:
        return ProcessorKwargs(**{name: getattr(self, name) for name in KWARGS})


class RequestOptions(KwargsFields):
    """`options` of a request. Unknown ones are rejected.

    Options for sizes and sampling apply to each item that does not set its own and whose kind takes
    them.
    """

    dtype: Dtype = Field(
        "bfloat16",
        description="Defaults to float32 for rows in a JSON or npz response, otherwise to "
        "bfloat16. In npz, bfloat16 becomes float32. float8_e4m3 is e4m3fn with one scale per row; "
        "it is not available for npz and for lists of numbers.",
        json_schema_extra=without_default,
    )
    timeout_s: float | None = Field(
        None, gt=0, strict=True, description="Defaults to the service's own timeout."
    )
    on_error: Literal["fail", "return"] = Field(
        "fail",
        description="fail: the response is the first error; return: each error replaces its item.",
    )
    evs_rate: float = Field(
        0.0,
        ge=0,
        lt=1,
        strict=True,
        description="The fraction of each video's rows to drop after encoding, where little "
        "changes from one group of frames to the next. Images keep all rows.",
    )
    reference: bool = Field(
        False,
        strict=True,
        description="Keep the embeddings for a while and return ids for fetching them.",
    )
    encoding: Literal["base64", "float"] | None = Field(
        None, description="How tensors are encoded in a JSON response. Defaults to base64."
    )


def request_options(values: dict[str, Any], *, strings: bool = False) -> RequestOptions:
    """The options of a request. Null means absent. Raises an InvalidOption that names every wrong
    option.

    `strings`: the values are strings, as in a query.
    """
    read = RequestOptions.model_validate_strings if strings else RequestOptions.model_validate
    try:
        return read({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        # A name that is not valid Unicode has no `loc`.
        problems = [reason(str((*one["loc"], "<name>")[0]), one) for one in error.errors()]
        raise InvalidOption("; ".join(f"options.{one}" for one in problems)) from None


def reason(name: str, problem: Mapping[str, Any]) -> str:
    """What is wrong with an option."""
    if problem["type"] == "extra_forbidden":
        return f"{name}: unknown; known are {', '.join(RequestOptions.model_fields)}"
    try:
        if name in KWARGS:
            check_option(name, problem["input"])
    except WireError as error:
        return str(error)
    said = problem["msg"]
    return f"{name} cannot be {short(problem['input'])}: {said[0].lower()}{said[1:]}"


class ErrorBody(BaseModel):
    """An error of the request or of one item."""

    type: str
    message: str
    item: int | None
    retryable: bool


class ErrorDocument(BaseModel):
    """The body of every response that is not 2xx."""

    error: ErrorBody


TIMES = "For videos: the time of each temporal group in seconds, as the model counts."
PACE = "For videos: seconds from one temporal group to the next."


class ItemDocument(BaseModel):
    """One item's embedding."""

    index: int
    type: Kind
    grid_thw: Grid = Field(
        description="Temporal groups, rows and columns, in patches. For models that cut tiles: "
        "all tiles side by side, without the one that shows the whole image. For sounds: "
        "windows, 1, positions per window."
    )
    tokens: int
    dtype: Dtype
    shape: tuple[int, int] = Field(description="Tokens, width.")
    data: str | None = Field(
        None,
        description="Row-major, little-endian; base64 in JSON, bytes in msgpack. "
        "Absent with `reference`.",
    )
    scales: str | None = Field(
        None,
        description="With float8_e4m3: one float32 factor per row, little-endian, by which the "
        "row's values are multiplied.",
    )
    reference: str | None = Field(None, description="Id for GET /v1/embeddings/{id}.")
    digest: str = Field(description="SHA-256 of the item's bytes.")
    source: Source
    deepstack: int = Field(
        description="Number of deepstack features that follow the main features in a row."
    )
    notice: str | None = Field(
        None,
        description="Set if the image was changed before encoding: transparency was composited, "
        "more than 8 bits per channel were scaled, CMYK was converted, or only the first frame was "
        "encoded.",
    )
    timestamps: list[float] | None = Field(None, description=TIMES)
    second_per_grid_ts: float | None = Field(None, description=PACE)
    frame_tokens: list[int] | None = Field(
        None, description="With `evs_rate`: rows kept per temporal group."
    )
    kept_rows: list[int] | None = Field(
        None,
        description="With `evs_rate`, and for images pruned by `preprocess.prune`: indices of "
        "the kept rows among all rows of the grid.",
    )


class FailedItem(BaseModel):
    """Takes the place of an item that failed, with `on_error: return`."""

    index: int
    type: Kind
    error: ErrorBody


class TimingsDocument(BaseModel):
    """Milliseconds. All but the total are the maximum over the items."""

    queue_ms: float
    preprocess_ms: float
    encode_ms: float
    total_ms: float


class EncodeDocument(BaseModel):
    """The response of POST /v1/encode."""

    model: str
    family: str = Field(
        description="The model's family, such as qwen3_vl. It determines how to read the rows."
    )
    weights: Literal["checkpoint", "dummy"]
    items: list[ItemDocument | FailedItem]
    timings: TimingsDocument


class PlannedItem(BaseModel):
    """What one item would cost."""

    index: int
    type: Kind
    width: int = Field(
        description="Pixels of the upright image or of each video frame; 0 for a sound."
    )
    height: int
    grid_thw: Grid = Field(description="The same as in its embedding.")
    tokens: int = Field(
        description="Rows of its embedding; with `evs_rate`, only the kept rows. For an image, an "
        "upper bound if `preprocess.prune` is on."
    )
    patches: int = Field(description="The cost of encoding it, on which admission is based.")
    seconds: float | None = Field(None, description="Duration of a sound.")
    digest: str = Field(description="SHA-256 of the item's bytes.")
    notice: str | None = None
    timestamps: list[float] | None = Field(None, description=TIMES)
    second_per_grid_ts: float | None = Field(None, description=PACE)


class PlanDocument(BaseModel):
    """The response of POST /v1/plan."""

    model: str
    family: str
    weights: Literal["checkpoint", "dummy"]
    items: list[PlannedItem | FailedItem]


class PlaceDocument(BaseModel):
    """The response of GET /v1/embeddings/{id}/place."""

    unix: str = Field(description="Path of a socket, open to processes of the replica's user.")
    tcp: str = Field(description="Address and port on the replica's node; empty if there is none.")
    version: int = Field(description="Protocol version of both.")


class BodyItem(KwargsFields):
    """An item of a JSON or msgpack request: `data`, `url` or `frames`."""

    type: Kind = "image"
    data: str | None = Field(None, description="Base64 in JSON, bytes in msgpack.")
    url: str | None = Field(
        None,
        description="`data:<type>;base64,...`, or an https URL of a host that the service allows.",
    )
    frames: list[str] | None = Field(
        None, description="A video as image files of equal size, all of which are encoded."
    )
    fps: float | None = Field(
        None,
        gt=0,
        description="Frame rate of `frames`; defaults to the model's own sampling rate. "
        "For video files: frames to sample per second.",
    )


class EncodeBody(BaseModel):
    """The body of POST /v1/encode and /v1/plan in JSON or msgpack."""

    items: list[BodyItem] = Field(min_length=1)
    options: RequestOptions = RequestOptions()


PREFIX = "#/components/schemas/"

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorDocument, "description": meaning}
    for status, meaning in {
        400: "Malformed request or item.",
        401: "Missing or unknown bearer token.",
        406: "No format in `Accept` is available.",
        413: "The body, the number of items, the pixels or the aspect ratio exceed a limit.",
        415: "Unsupported format or kind of item.",
        422: "Unknown option or invalid value.",
        429: "Overloaded: retry after Retry-After seconds.",
        500: "Internal error.",
        503: "No encoder is available.",
        504: "The request timed out.",
    }.items()
}
MISSING = ERRORS | {
    404: {
        "model": ErrorDocument,
        "description": "No embedding is kept under this id, or no longer.",
    }
}

OPEN: dict[str, Any] = {"security": []}  # of routes that need no token


def schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": PREFIX + model.__name__}}


FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
BINARY = {"schema": {"type": "string", "format": "binary"}}

ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": EncodeDocument,
        "description": "Embeddings in request order. Without `Accept`, or with `*/*`: "
        "JSON if the request is JSON, otherwise msgpack.",
        "content": {
            "application/msgpack": schema(EncodeDocument),
            "application/vnd.safetensors": BINARY,
            "application/x-npz": {
                "schema": BINARY["schema"]
                | {
                    "description": "For numpy.load: arrays 0, 1, ... by index; answer.json has "
                    "the rest of the response."
                }
            },
        },
    }
}

PLANS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": PlanDocument,
        "description": "Plans in request order.",
        "content": {"application/msgpack": schema(PlanDocument)},
    }
}

QUERY = RequestOptions.model_json_schema()["properties"]
for shown in QUERY.values():  # generated clients would send the defaults beside a body
    without_default(shown)

ENCODE: dict[str, Any] = {
    "parameters": [
        {
            "name": "X-Request-Id",
            "in": "header",
            "description": "Up to 128 letters, digits and ._:-; any other value is replaced.",
            "schema": {"type": "string"},
        },
        *(
            {
                "name": name,
                "in": "query",
                "description": "Only if the body is a bare file.",
                "schema": shown,
            }
            for name, shown in QUERY.items()
        ),
    ],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "image": FILES,
                        "video": FILES,
                        "audio": FILES,
                        "options": {"$ref": PREFIX + RequestOptions.__name__},
                    },
                },
                "encoding": {"options": {"contentType": "application/json"}},
            },
            "application/json": schema(EncodeBody),
            "application/msgpack": schema(EncodeBody),
            "image/*": BINARY,
            "video/*": BINARY,
            "audio/*": BINARY,
        },
    },
}


def describe(app: FastAPI, *, closed: bool) -> None:
    """Adds the schemas of bodies to the OpenAPI document and, if `closed`, the bearer token."""
    plain = app.openapi
    bodies: list[type[BaseModel]] = [EncodeBody]
    app.state.bodies = bodies  # llm/http.py adds its own

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            for body in bodies:
                shown = body.model_json_schema(ref_template=PREFIX + "{model}")
                document["components"]["schemas"] |= shown.pop("$defs") | {body.__name__: shown}
            if closed:
                bearer = {"bearer": {"type": "http", "scheme": "bearer"}}
                document["components"]["securitySchemes"] = bearer
                document["security"] = [{"bearer": []}]
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
