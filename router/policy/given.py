"""What came of a flight, for each place of a request that waits for it: an id is one place's alone.

Ray is the fleet's business.
"""

from __future__ import annotations

import asyncio

from actors.errors import DeadlineExceeded, EmbeddingLost
from actors.types import Answer, Embedding
from router.policy.coalesce import Flight
from router.replicas.fleet import Fleet, ReplicaFull, ShardLost
from router.replicas.liveness import Watch


class Given:
    """Asks for more ids, where several wait for what its replica keeps."""

    def __init__(self, fleet: Fleet, watch: Watch) -> None:
        self._fleet = fleet
        self._watch = watch

    async def answers(
        self, flight: Flight, places: int, late: DeadlineExceeded, deadline: float
    ) -> list[Answer]:
        """One for each place of one request.

        The first request that comes has the id of the flight's own answer for one place; all other
        places get ids of their own. `late`: what a place gets that has none in time.
        """
        answer, given = flight.answer.result(), flight.given
        flight.given = True
        if not isinstance(answer, Embedding) or not answer.reference:
            return [answer] * places
        first: list[Answer] = [] if given else [answer]
        return first + await self._more(answer, places - len(first), late, deadline)

    async def _more(
        self, answer: Embedding, count: int, late: DeadlineExceeded, deadline: float
    ) -> list[Answer]:
        if not count:
            return []
        try:
            async with asyncio.timeout_at(deadline), self._watch.over(answer.replica):
                return await self._fleet.keep_again(answer, count)
        except TimeoutError:
            return [late] * count
        except (ReplicaFull, ShardLost) as error:
            return [EmbeddingLost(f"encoded, but kept by a replica that is lost: {error}")] * count
