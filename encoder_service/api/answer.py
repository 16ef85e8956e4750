"""Builds response documents from embeddings, and the model card. `data` is a buffer, not copied."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from actors.engine.budgets import Capacity, model_capacity
from actors.errors import InvalidOption, ServiceError, TooLarge
from actors.options import ReferenceOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.video import retained_tokens
from actors.types import Answer, Embedding, Media
from encoder_service import __version__
from encoder_service.api.errors import fault
from encoder_service.api.schema import RequestOptions
from encoder_service.config import LimitOptions, ServiceOptions
from encoder_service.intake.media import largest_tokens, longest_seconds
from encoder_service.wire.formats import WIDTHS, Document, to_array

MOST_FLOAT_BYTES = 16 * 2**20
"""Limit for tensors sent as lists of numbers, which take about ten characters and half a
microsecond per value."""

DEPENDENCIES = ("ray", "torch", "transformers")


def check_size(
    media: Sequence[Media],
    options: RequestOptions,
    spec: ModelSpec,
    limits: LimitOptions,
    references: ReferenceOptions,
) -> int:
    """Size of the tensors in bytes. Raises TooLarge if they are too large to send, or to keep."""
    most, name = limits.max_response_bytes, "limits.max_response_bytes"
    less = "send fewer items at a time" if len(media) > 1 else "raise it, send a smaller item"
    advice = f"{less}, or ask for ids with options.reference"
    if options.encoding == "float" and most > MOST_FLOAT_BYTES:
        most, name = MOST_FLOAT_BYTES, "the limit for lists of numbers"
        advice = "leave options.encoding out, or send fewer or smaller items"
    if options.reference:
        most, name = references.max_bytes, "references.max_bytes"
        advice = "raise it, or send a smaller item"
        if len(media) > 1:
            advice = "send fewer items at a time, because the last would evict the first"
    tokens = sum(retained_tokens(one.plan, one.evs_rate) for one in media)
    size_bytes = tokens * spec.width * WIDTHS[options.dtype]
    if size_bytes > most:
        raise TooLarge(f"the answer would be {size_bytes} bytes, over {most} ({name}): {advice}")
    return size_bytes


def finite(answers: Sequence[Answer]) -> list[Answer]:
    """The answers, with an InvalidOption in place of rows that lists of numbers cannot express."""

    def is_finite(one: Embedding) -> bool:
        assert isinstance(one.data, np.ndarray), "an embedding not read yet. This is a bug."
        return bool(np.isfinite(to_array(one.data, one.dtype, one.shape)).all())

    refused = InvalidOption(
        "options.encoding: float has no NaN and no infinity, which the rows of this item contain: "
        "leave options.encoding out"
    )
    return [
        refused if isinstance(one, Embedding) and not is_finite(one) else one for one in answers
    ]


def document(
    spec: ModelSpec, items: Sequence[Document], answers: Sequence[Answer], seconds: float
) -> Document:
    """The whole response, `seconds` after the request arrived. `items`: see item_document."""
    embeddings = [one for one in answers if isinstance(one, Embedding)]
    return head(spec) | {"items": list(items), "timings": timings(embeddings, seconds)}


def head(spec: ModelSpec) -> Document:
    return {"model": spec.id, "family": spec.family, "weights": spec.weights}


def item_document(
    spec: ModelSpec,
    index: int,
    kind: str,
    media: Media | ServiceError,
    answer: Answer,
    request_id: str,
) -> Document:
    if isinstance(answer, ServiceError):
        return failed_item(index, kind, answer, request_id)
    assert isinstance(media, Media), "an embedding without its media. This is a bug."
    return (
        {
            "index": index,
            "type": kind,
            "grid_thw": list(answer.grid_thw),
            "tokens": answer.shape[0],
            "dtype": answer.dtype,
            "shape": list(answer.shape),
            "digest": media.digest,
            "source": answer.source,
            "deepstack": spec.deepstack,
        }
        | content(answer)
        | video_times(spec, media)
        | kept_rows(answer)
        | ({"notice": media.notice} if media.notice else {})
    )


def plan_document(
    spec: ModelSpec, index: int, kind: str, media: Media | ServiceError, request_id: str
) -> Document:
    """What an item would cost. `tokens` is the number of rows that encoding it would give."""
    if isinstance(media, ServiceError):
        return failed_item(index, kind, media, request_id)
    assert media.size, "an item whose header was not read. This is a bug."
    audio = spec.audio if media.kind == "audio" else None
    return (
        {
            "index": index,
            "type": kind,
            "width": 0 if audio else media.size.width,
            "height": 0 if audio else media.size.height,
            "grid_thw": list(media.plan.grid_thw),
            "tokens": retained_tokens(media.plan, media.evs_rate),
            "patches": media.plan.patches,
            "digest": media.digest,
        }
        | video_times(spec, media)
        | ({"seconds": round(media.size.width / audio.rate, 6)} if audio else {})
        | ({"notice": media.notice} if media.notice else {})
    )


def failed_item(index: int, kind: str, error: ServiceError, request_id: str) -> Document:
    problem = fault(error, request_id).document() | {"item": index}
    return {"index": index, "type": kind, "error": problem}


def kept_rows(embedding: Embedding) -> Document:
    """The rows that remain of a video after `evs_rate`, or of an image after `preprocess.prune`."""
    names = ("frame_tokens", "kept_rows")
    return {name: list(found) for name in names if (found := getattr(embedding, name))}


def content(embedding: Embedding) -> Document:
    if embedding.reference:
        return {"reference": embedding.reference}
    assert isinstance(embedding.data, np.ndarray), "an embedding not read yet. This is a bug."
    scales = {"scales": embedding.scales} if embedding.scales else {}
    return {"data": embedding.data.data} | scales


def video_times(spec: ModelSpec, media: Media) -> Document:
    """Times of a video's frame groups, which some language models take as input."""
    video = spec.asked("video", media.kwargs).video if media.clip else None
    if media.clip is None or video is None:
        return {}
    return {
        "timestamps": [round(seconds, 6) for seconds in video.timestamps(media.clip)],
        "second_per_grid_ts": round(video.seconds_per_group(media.clip), 6),
    }


def timings(embeddings: Sequence[Embedding], seconds: float = 0) -> Document:
    """The maximum of each stage over all items, because items overlap, and the request's total."""
    stages = {
        f"{stage}_ms": milliseconds(
            max((getattr(one.timings, f"{stage}_seconds") for one in embeddings), default=0.0)
        )
        for stage in ("queue", "preprocess", "encode")
    }
    return stages | {"total_ms": milliseconds(seconds)}


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def model_card(options: ServiceOptions, spec: ModelSpec) -> Document:
    """The document of GET /v1/model, with the precision that is configured; see Service.model. It
    does not change while the service runs."""
    holds = model_capacity(options.graphs, spec)
    smallest, largest = spec.sizing.token_range()
    return head(spec) | {
        "revision": spec.revision,
        "dtype": spec.dtype,
        "kinds": list(spec.kinds),
        "width": spec.width,
        "deepstack": spec.deepstack,
        "output": "vector" if spec.vector else "rows",
        "text_tokens": spec.text_plan.patches if spec.text_plan else 0,
        "audio_seconds": longest_seconds(spec, options.limits) if spec.audio else 0,
        "tokens_per_item": {"smallest_budget": smallest, "largest": largest},
        "processor_kwargs": kwargs_card(options, spec, holds),
        "preprocess": {"prune": options.preprocess.prune},
        "references": options.lasting_references.model_dump(include={"ttl_seconds", "max_bytes"}),
        "graphs": {
            "mode": options.graphs.mode,
            "blocks": options.block_form(fast=spec.fast_blocks),
            "precision": options.graphs.precision,
            "token_budgets": dict(
                zip(spec.paths, (list(budgets) for budgets in holds.budgets), strict=True)
            ),
            "max_vision_items_per_batch": holds.items,
            "max_frames_per_batch": holds.frames,
        },
        "limits": options.limits.model_dump(),
        "fetch_hosts": list(options.fetch.allow_hosts),
        "versions": {"encoder-service": __version__}
        | {name: version(name) for name in DEPENDENCIES},
    }


def kwargs_card(options: ServiceOptions, spec: ModelSpec, room: Capacity) -> Document:
    """Options that a request may set for items of each kind, with their defaults (None: not set)
    and largest values."""
    tokens = largest_tokens(spec, options.limits, room.tokens[spec.image_path])
    return {
        kind: {
            name: {"default": default, "largest": spec.largest(kind, tokens)[name]}
            for name, default in spec.defaults(kind).items()
        }
        for kind in spec.kinds
    }
