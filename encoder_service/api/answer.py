"""What the router gave back -> the response document. Pure; `data` stays a buffer, not copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.spec.model_spec import ModelSpec
from actors.types import Answer, Embedding, Media
from encoder_service.api.errors import fault

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a request on its way back."""

    index: int
    type: str
    media: Media | None
    """None: the item was refused before it came to that."""
    answer: Answer


def head(spec: ModelSpec) -> Json:
    """What every response says of the model."""
    return {"model": spec.id, "family": spec.family, "weights": spec.weights}


def document(spec: ModelSpec, entries: Sequence[Entry], seconds: float, request_id: str) -> Json:
    """The whole response, `seconds` after the request came."""
    embeddings = [entry.answer for entry in entries if isinstance(entry.answer, Embedding)]
    return head(spec) | {
        "items": [item(spec, entry, request_id) for entry in entries],
        "timings": timings(embeddings) | {"total_ms": milliseconds(seconds)},
    }


def item(spec: ModelSpec, entry: Entry, request_id: str) -> Json:
    """One item of the response."""
    place = {"index": entry.index, "type": entry.type}
    if not isinstance(entry.answer, Embedding):
        error = fault(entry.answer, request_id).document()
        return place | {"error": error | {"item": entry.index}}
    embedding, media = entry.answer, entry.media
    assert media is not None, "an embedding without its media. This is a bug."
    return (
        place
        | {
            "grid_thw": list(embedding.grid_thw),
            "tokens": embedding.shape[0],
            "dtype": embedding.dtype,
            "shape": list(embedding.shape),
            "digest": media.digest,
            "source": embedding.source,
            "deepstack": spec.deepstack,
        }
        | content(embedding)
        | times(spec, media)
        | ({"frame_tokens": list(embedding.frame_tokens)} if embedding.frame_tokens else {})
        | ({"notice": media.notice} if media.notice else {})
    )


def times(spec: ModelSpec, media: Media) -> Json:
    """When the groups of frames of a video are shown, which language models are told."""
    if media.clip is None or spec.video is None:
        return {}
    return {
        "timestamps": [round(seconds, 6) for seconds in spec.video.timestamps(media.clip)],
        "second_per_grid_ts": round(spec.video.seconds_per_group(media.clip), 6),
    }


def content(embedding: Embedding) -> Json:
    """The rows, or the id to fetch them by."""
    if embedding.reference:
        return {"reference": embedding.reference}
    assert isinstance(embedding.data, np.ndarray), "an embedding not read yet. This is a bug."
    return {"data": embedding.data.data}


def timings(embeddings: Sequence[Embedding]) -> Json:
    """The longest of each stage, in milliseconds: stages of different items overlap."""
    return {
        f"{stage}_ms": milliseconds(
            max((getattr(one.timings, f"{stage}_seconds") for one in embeddings), default=0.0)
        )
        for stage in ("queue", "preprocess", "encode")
    }


def milliseconds(seconds: float) -> float:
    """Rounded to a microsecond."""
    return round(seconds * 1e3, 3)
