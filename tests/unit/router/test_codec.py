"""What goes into a message of replica.proto comes out of it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import EncodeFailed, InvalidMedia, Overloaded, TooLarge, Unavailable
from actors.rpc import replica_pb2 as pb
from actors.rpc.codec import (
    EncodeCall,
    ReceivedRows,
    embedding_fields,
    error_fields,
    error_of,
    from_message,
    kept_fields,
    kept_of,
    message_fields,
    reply_fields,
    reply_of,
)
from actors.rpc.server import SentRows
from actors.store.kept import Kept
from actors.telemetry.tracing import Origin
from actors.types import (
    Alpha,
    Answer,
    Clip,
    Dtype,
    Embedding,
    ItemPlan,
    Media,
    ProcessorKwargs,
    ReceivedBytes,
    Reply,
    SharedBytes,
    Size,
    Timings,
)

INT = st.integers(0, 2**31 - 1)
FLOAT = st.floats(0, allow_nan=False, allow_infinity=False)
GRID = st.tuples(INT, INT, INT)
TEXT = st.text(max_size=20)
INTS = st.lists(INT, max_size=4).map(tuple)
PLANS = st.builds(
    ItemPlan,
    *(GRID, INT, INT, INTS),
    frames=INT,
    path_patches=INTS,
    kept=INTS,
    group_pictures=INT,
    blocks=st.binary(max_size=9),
)
CLIPS = st.builds(Clip, st.builds(Size, INT, INT), INT, FLOAT, st.booleans())
MEDIA = st.builds(
    Media,
    st.sampled_from(["image", "video"]),
    st.binary(max_size=50),
    PLANS,
    TEXT,
    notice=TEXT,
    clip=st.none() | CLIPS,
    frames=st.lists(st.binary(max_size=9), max_size=3).map(tuple),
    evs_rate=FLOAT,
    on_device=st.booleans(),
    size=st.none() | st.builds(Size, INT, INT),
    alpha=st.sampled_from(get_args(Alpha)),
    kwargs=st.builds(ProcessorKwargs, *[st.none() | INT] * 3, st.none() | FLOAT, st.none() | INT),
    prune=st.booleans(),
)
DTYPES = st.sampled_from(get_args(Dtype))
CALLS = st.builds(
    EncodeCall,
    st.lists(MEDIA, max_size=3),
    DTYPES,
    FLOAT,
    st.builds(Origin, TEXT, TEXT),
    st.booleans(),
)
ROWS = st.binary(max_size=50).map(lambda data: np.frombuffer(data, np.uint8))
SHARED = st.builds(SharedBytes, st.builds(object), INT)
EMBEDDINGS = st.builds(
    Embedding,
    ROWS | SHARED,
    DTYPES,
    st.tuples(INT, INT),
    GRID,
    st.sampled_from(["graph", "eager", "cache"]),
    st.builds(Timings, FLOAT, FLOAT, FLOAT),
    replica=TEXT,
    frame_tokens=INTS,
    kept_rows=INTS,
    reference=TEXT,
    scales=st.binary(max_size=9),
)
ERRORS = st.one_of(
    st.sampled_from([InvalidMedia, TooLarge, Unavailable]).flatmap(lambda k: TEXT.map(k)),
    st.builds(Overloaded, TEXT, FLOAT),
)


def same(answer: Answer, other: Answer) -> bool:
    if not isinstance(answer, Embedding) or not isinstance(other, Embedding):
        return (type(answer), str(answer)) == (type(other), str(other))
    if isinstance(answer.data, np.ndarray):
        assert isinstance(other.data, np.ndarray)
        assert not other.data.flags.writeable
        assert answer.data.tobytes() == other.data.tobytes()
        answer = replace(answer, data=other.data)
    return answer == other


@given(CALLS)
def test_a_call_survives(call: EncodeCall) -> None:
    sent = pb.EncodeRequest(**message_fields(call)).SerializeToString()
    assert from_message(pb.EncodeRequest.FromString(sent), EncodeCall) == call


@given(st.lists(EMBEDDINGS | ERRORS, max_size=4), INT, INT)
def test_a_reply_survives_and_its_shared_rows_stay_outside(
    answers: list[Answer], patches: int, pairs: int
) -> None:
    rows = SentRows()
    sent = pb.EncodeReply(
        **reply_fields(Reply(answers, patches, pairs), rows.put)
    ).SerializeToString()
    found = reply_of(pb.EncodeReply.FromString(sent), ReceivedRows(rows.shared))
    assert (found.outstanding_patches, found.outstanding_pairs) == (patches, pairs)
    assert len(found.answers) == len(answers)
    assert all(map(same, answers, found.answers))
    large = [one for one in answers if isinstance(getattr(one, "data", None), SharedBytes)]
    assert len(rows.shared) == len(large)


@given(MEDIA, EMBEDDINGS)
def test_what_is_kept_survives(media: Media, embedding: Embedding) -> None:
    kept, rows = Kept.of(media, embedding), SentRows()
    sent = pb.Kept(**kept_fields(kept, rows.put)).SerializeToString()
    found = kept_of(pb.Kept.FromString(sent), ReceivedRows(rows.shared))
    assert found.media == kept.media
    assert same(found.embedding, kept.embedding)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (EncodeCall, pb.EncodeRequest),
        (Media, pb.Media),
        (ItemPlan, pb.ItemPlan),
        (Clip, pb.Clip),
        (Size, pb.Size),
        (Origin, pb.Origin),
        (Timings, pb.Timings),
        (Kept, pb.Kept),
        (Embedding, pb.Embedding),
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_new_field_is_not_forgotten(kind: Any, message: Any) -> None:
    there = {field.name for field in message.DESCRIPTOR.fields}
    assert {field.name for field in fields(kind)} == there - {"shared", "lent"}


def test_what_is_no_error_of_the_service_is_our_fault() -> None:
    found = error_of(pb.Error(**error_fields(ZeroDivisionError("division"))))
    assert type(found) is EncodeFailed
    assert "division" in found.message


def test_an_error_of_a_later_version_is_still_an_error() -> None:
    found = error_of(pb.Error(type="NoSuchType", message="x"))
    assert (type(found), found.message) == (EncodeFailed, "x")


def test_an_error_may_quote_what_is_not_utf_8() -> None:
    sent = pb.Error(**error_fields(InvalidMedia("a \udcff b")))
    assert error_of(sent).message == "a ? b"


def test_rows_on_a_device_are_refused() -> None:
    rows: Any = ReceivedBytes(object())
    one = Embedding(rows, "float32", (1, 1), (1, 1, 1), "graph", Timings(0, 0, 0))
    with pytest.raises(TypeError, match="ReceivedBytes"):
        embedding_fields(one, SentRows().put)
