"""Calls that go to a replica's actor, past the handle of its deployment: half of the work and time.

A handle first asks the replica for room, over a stream that then carries the answer. Encoders take
whatever comes (app.py), and which of them is the router's to say. To the replica it is a call as
any other: it is counted, waited for when the replica is drained, and ends when it is cancelled. One
that comes later yet, Serve would refuse by the handle; here the encoder does.

`ReplicaActor.handle_request` is private to Serve; tests/unit/router/test_direct.py guards it.
"""

from __future__ import annotations

from collections.abc import Generator
from pickle import dumps
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.serve._private.common import RequestMetadata
from ray.serve._private.utils import generate_request_id

from router.replicas.registry import Replica


class DirectCall:
    """One call, begun. Awaited as what a handle gives, and raises what that raises.

    A replica that died may have done so before the call came: that is not told apart.
    """

    def __init__(self, replica: Replica, method: str, *arguments: Any) -> None:
        """`replica` must have an actor."""
        own_id = generate_request_id()
        metadata = RequestMetadata(own_id, own_id, call_method=method)
        self._replica = replica
        self._answer = replica.actor.handle_request.remote(dumps(metadata), *arguments)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._answer.__await__())
        except ActorDiedError:
            self._replica.died()
            raise

    def cancel(self) -> None:
        """Nobody waits any more."""
        ray.cancel(self._answer)
