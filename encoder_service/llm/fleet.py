"""The language model's replicas behind their Serve handle: service.ChatBackend over Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from actors.errors import Overloaded
from encoder_service.api.errors import AtItem
from encoder_service.llm.service import ReplicaLost
from encoder_service.llm.types import Call, Event, Failed
from encoder_service.ops.replicas import ask_all
from router.replicas.serve_fleet import LOST, brief


class ChatFleet:
    """Calls go to the replica that Serve finds least busy."""

    def __init__(self, chat: DeploymentHandle) -> None:
        self.handle = chat
        self.calls = chat.options(method_name="complete", stream=True, _by_reference=True)

    async def complete(self, call: Call) -> AsyncGenerator[Event]:
        """The answer as it grows; closing it ends the generation."""
        response = self.calls.remote(call)
        try:
            async for event in response:
                if isinstance(event, Failed):
                    raise event.error if event.item is None else AtItem(event.item, event.error)
                yield event
        except BackPressureError:
            raise Overloaded(
                "every replica of the language model has its hands full, and as many requests as "
                "may wait are waiting (llm.max_queued_requests): come back later"
            ) from None
        except LOST as error:
            raise lost(error) from error
        except RayTaskError as error:
            if isinstance(error.cause, LOST):
                raise lost(error.cause) from error
            raise
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise

    async def ready_replicas(self) -> int:
        """Replicas that answer: Serve gives them work once their weights are loaded."""
        return sum(page is not None for page in await ask_all(self.handle, "scrape"))


def lost(error: Exception) -> ReplicaLost:
    """The replica is at fault, not the request."""
    return ReplicaLost(
        f"a replica of the language model was lost ({brief(error)}): send the request again"
    )
