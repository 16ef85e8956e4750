"""Serve handle calls that are pinned to a replica, and the list of replicas.

Set on the Encoder deployment: `request_router_class="router.replicas.pinned:PinnedRequestRouter"`.
Serve pickles this module by value, so it has no state, and imports shared state inside methods.

All private API of Serve that this project uses is used here:
- the class `PowerOfTwoChoicesRequestRouter` and its `_choose_replica_for_request`, `_replicas` and
  `_deployment_id`, because `choose_replicas`, the documented hook, matches chosen replicas to
  waiting calls by the id of the parent request. Sibling calls share that id, so they would get each
  other's replica or wait forever;
- the option `_by_reference` of a handle, at its default, so that answers with object references
  never go through Serve's own gRPC, where they would never be released;
- `_fetch_replica_results_async` of a broadcast, and `add_done_callback` of its results, because the
  public `results_async` loses all results if one replica hangs.
tests/unit/router/test_pinned.py guards them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.handle import DeploymentHandle

PIN = "pin:"
ASK_SECONDS = 2.0  # replicas that take longer to answer a broadcast count as missing


def pinned(handle: DeploymentHandle, replica: str) -> DeploymentHandle:
    """A handle whose calls reach this replica, or raise PinnedReplicaUnavailable at once."""
    return handle.options(session_id=PIN + replica, _by_reference=True)


def by_reference(handle: DeploymentHandle, method: str) -> DeploymentHandle:
    """A handle to a method whose answers contain object references."""
    return handle.options(method_name=method, _by_reference=True)


async def ask_all(handle: DeploymentHandle, method: str) -> list[tuple[str, str] | None]:
    """Calls a method of every replica. The result is None for one that fails or takes too long."""

    async def ask(call: Any) -> tuple[str, str] | None:
        # Serve's own callbacks wait for the answer too. If they run on an answer of over 100 KB
        # that nothing refers to any more, Ray aborts this process. Keep a reference until then.
        call.add_done_callback(lambda _: call)
        try:
            async with asyncio.timeout(ASK_SECONDS / 2):
                page: tuple[str, str] = await call.get_async()
                return page
        except Exception:
            call.cancel()
            return None

    try:
        async with asyncio.timeout(ASK_SECONDS / 2):
            calls = await handle.broadcast(method)._fetch_replica_results_async()
    except Exception:
        return [None]
    return list(await asyncio.gather(*map(ask, calls)))


class PinnedRequestRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Sends a pinned call to its replica. Calls that are not pinned use power of two choices."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._by_name: dict[str, Any] = {}

    def update_replicas(self, replicas: list[Any]) -> None:
        """Called when the controller announces that replicas came, went, or reported."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def _choose_replica_for_request(
        self, pending_request: Any, *, is_retry: bool = False
    ) -> Any:
        from router.replicas.fleet import PinnedReplicaUnavailable

        session: str = pending_request.metadata.session_id
        if not session.startswith(PIN):
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        name = session.removeprefix(PIN)
        replica = self._by_name.get(name)
        if replica is None:
            raise PinnedReplicaUnavailable(f"replica {name} is gone")
        if is_retry:  # it was unreachable, or had max_ongoing_requests calls already
            raise PinnedReplicaUnavailable(f"replica {name} does not take the call")
        return replica

    def _publish(self) -> None:
        from router.replicas.fleet import PUBLISHED, Replica

        self._by_name = {
            replica_id.unique_id: replica for replica_id, replica in self._replicas.items()
        }
        PUBLISHED[self._deployment_id.app_name, self._deployment_id.name] = {
            name: Replica.of(replica.replica_metadata, replica.routing_stats)
            for name, replica in sorted(self._by_name.items())
        }
