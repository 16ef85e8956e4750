"""The table of errors: statuses, codes, and that nothing internal gets out."""

import logging

import grpc
import pytest

from actors import errors
from actors.errors import InvalidMedia, Overloaded, ServiceError, StartError
from encoder_service.api.errors import TABLE, AtItem, fault, row_of, row_of_status

CONTRACT = {400, 401, 404, 406, 413, 415, 422, 429, 500, 503, 504}


def tree() -> list[type[ServiceError]]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ServiceError) and kind is not ServiceError
    ]


@pytest.mark.parametrize("kind", tree())
def test_every_error_of_a_request_has_a_row(kind: type[ServiceError]) -> None:
    row = row_of(kind)
    assert row.status in CONTRACT
    assert row.code is not grpc.StatusCode.OK
    # What goes wrong at start never answers a request: if it does, that is internal.
    assert (row.type == "internal_error") == issubclass(kind, StartError)


def test_types_are_snake_case_and_not_repeated() -> None:
    types = [row.type for row in TABLE.values()]
    assert len(set(types)) == len(types)
    assert all(name.replace("_", "").islower() for name in types)


def test_a_class_without_a_row_has_that_of_its_nearest_ancestor() -> None:
    assert row_of(InvalidMedia).type == "invalid_request"


def test_only_what_may_pass_is_worth_a_retry() -> None:
    retryable = {row.status for row in TABLE.values() if row.retryable}
    assert retryable == {429, 503, 504}


def test_overload_says_when_to_come_back() -> None:
    problem = fault(Overloaded("full", 2.5), "id")
    assert (problem.row.status, problem.retry_after_seconds) == (429, 2.5)


def test_what_ray_wraps_is_unwrapped() -> None:
    wrapper = RuntimeError("a traceback")
    wrapper.cause = Overloaded("full", 3)  # type: ignore[attr-defined]
    assert fault(AtItem(4, InvalidMedia("torn")), "id").document() == {
        "type": "invalid_request",
        "message": "torn",
        "item": 4,
        "retryable": False,
    }
    assert fault(wrapper, "id").message == "full"


def test_the_unforeseen_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        problem = fault(KeyError("secret"), "the-id")
    assert (problem.row.status, problem.row.type) == (500, "internal_error")
    assert "secret" not in problem.message
    assert "the-id" in problem.message
    assert "the-id" in caplog.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("status", "name"),
    [(404, "not_found"), (405, "method_not_allowed"), (418, "invalid_request")],
)
def test_errors_of_the_framework_have_a_row(status: int, name: str) -> None:
    row = row_of_status(status)
    assert (row.status, row.type) == (status, name)
