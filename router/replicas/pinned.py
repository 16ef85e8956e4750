"""Handle calls that reach the replica they name: `handle.options(session_id="pin:<replica>")`.

Set on the Encoder deployment as `request_router_class="router.replicas.pinned.PinnedRequestRouter"`
Serve pickles this module by value: no state here, and what is shared is imported inside methods.
Knows nothing of items, patches or plans. It also is how direct.py comes by the replicas' actors.

`RequestRouter._choose_replica_for_request` is semi-private; tests/unit/router/test_pinned.py
guards it.
Overriding `choose_replicas`, the documented hook, does not do: the class behind it matches chosen
replicas to waiting calls by the id of the parent request, which sibling calls share, so that they
get each other's replica or wait for ever.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

PIN = "pin:"


class PinnedRequestRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Obeys the pin, or fails at once: PinnedReplicaUnavailable, or PinnedReplicaFull.

    Calls that are not pinned: power of two.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, before anything else."""
        self._by_name: dict[str, Any] = {}
        self._silent: set[str] = set()
        """Replicas that could not be reached when last tried."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """The controller's word: replicas came, went, or reported."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """A call saw it first."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def on_replica_actor_unavailable(self, replica_id: Any) -> None:
        """The connection to it broke."""
        super().on_replica_actor_unavailable(replica_id)
        self._silent.add(replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: Any, num_ongoing_requests: int) -> None:
        """It took a call, or refused one."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._silent.discard(replica_id.unique_id)

    async def _choose_replica_for_request(
        self, pending_request: Any, *, is_retry: bool = False
    ) -> Any:
        from router.replicas.registry import PinnedReplicaFull, PinnedReplicaUnavailable

        session: str = pending_request.metadata.session_id
        if not session.startswith(PIN):
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        name = session.removeprefix(PIN)
        replica = self._by_name.get(name)
        if replica is None:
            raise PinnedReplicaUnavailable(f"replica {name} is gone")
        if is_retry and name in self._silent:
            raise PinnedReplicaUnavailable(f"replica {name} cannot be reached")
        if is_retry:
            raise PinnedReplicaFull(f"replica {name} has as many calls as it takes")
        return replica

    def _publish(self) -> None:
        from router.replicas.registry import REGISTRY, Replica

        self._by_name = {
            replica_id.unique_id: replica for replica_id, replica in self._replicas.items()
        }
        self._silent &= self._by_name.keys()
        REGISTRY.publish(
            (self._deployment_id.app_name, self._deployment_id.name),
            {
                name: Replica(
                    metadata=replica.replica_metadata,
                    outstanding_patches=int(replica.routing_stats.get("outstanding_patches", 0)),
                    actor=replica._actor_handle,
                    died=partial(
                        self._event_loop.call_soon_threadsafe,
                        self.on_replica_actor_died,
                        replica.replica_id,
                    ),
                )
                for name, replica in self._by_name.items()
            },
        )
