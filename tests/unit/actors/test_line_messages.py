"""What goes over a line is what comes out of it."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from actors.errors import EncodeFailed, InvalidMedia, TooLarge, Unavailable
from actors.line_messages import Asked, Call, Made, asked_bytes, asked_of, told_bytes, told_of
from actors.telemetry.request_context import Origin
from actors.types import Answer, Clip, Embedding, Reply, Size
from tests.unit.fleet import embedding, item

CALL = Call([item(1), item(2)], "float16", 3.5, Origin("an id", "a trace"), keep=False)
VIDEO = replace(
    item(3), kind="video", clip=Clip(Size(4, 6), 5, 2.5), frames=(b"one", b"two"), evs_rate=0.5
)


def same(answer: Answer, other: Answer) -> bool:
    if isinstance(answer, Embedding) and isinstance(other, Embedding):
        assert isinstance(answer.data, np.ndarray)
        assert isinstance(other.data, np.ndarray)
        assert replace(answer, data=other.data) == other
        return answer.data.tobytes() == other.data.tobytes()
    return (type(answer), str(answer)) == (type(other), str(other))


def test_a_new_field_of_embeddings_is_not_forgotten() -> None:
    assert {one.name for one in fields(Made)} == {one.name for one in fields(Embedding)}


def test_messages_say_all_that_a_call_and_its_answers_have() -> None:
    call = replace(CALL, media=[*CALL.media, VIDEO], keep=True)
    assert asked_of(asked_bytes(Asked(5, call))) == Asked(5, call)
    kept = replace(embedding(item(1), "a"), data=np.empty(0, np.uint8), reference="a.x")
    pruned = replace(embedding(VIDEO, "b"), frame_tokens=(3, 1))
    answers: list[Answer] = [kept, pruned, InvalidMedia("bad"), TooLarge("large")]
    number, reply = told_of(told_bytes(9, Reply(answers, 11)))
    assert number == 9
    assert isinstance(reply, Reply)
    assert reply.outstanding_patches == 11
    assert all(map(same, reply.answers, answers))
    _, failure = told_of(told_bytes(9, Unavailable("not now")))
    assert isinstance(failure, Unavailable)
    assert failure.message == "not now"
    assert "division" in str(told_of(told_bytes(9, ZeroDivisionError("division")))[1])

    class Newer(InvalidMedia):
        """Of a later version."""

    _, failure = told_of(told_bytes(9, Newer("x")))
    assert type(failure) is EncodeFailed
    assert failure.message == "x"


@pytest.mark.parametrize("message", [b"", b"\xc1", asked_bytes(Asked(1))[:-1], b"\x90", b"\x81"])
def test_what_is_no_message_is_none(message: bytes) -> None:
    for read in (asked_of, told_of):
        with pytest.raises(ValueError):  # noqa: PT011
            read(message)
