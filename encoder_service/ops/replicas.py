"""One question to every replica of a deployment."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.handle import DeploymentHandle

SCRAPE_SECONDS = 2.0


async def ask_all(handle: DeploymentHandle, method: str) -> list[tuple[str, str] | None]:
    """What each replica gives; None for one that fails or takes too long.

    The public `results_async` loses all results when one hangs, hence the private call.
    """
    try:
        async with asyncio.timeout(SCRAPE_SECONDS / 2):
            calls = await handle.broadcast(method)._fetch_replica_results_async()
    except Exception:
        return [None]
    return list(await asyncio.gather(*(ask_one(call) for call in calls)))


async def ask_one(call: Any) -> tuple[str, str] | None:
    """One replica's result, if it comes in time."""
    try:
        async with asyncio.timeout(SCRAPE_SECONDS / 2):
            page: tuple[str, str] = await call.get_async()
            return page
    except Exception:
        call.cancel()
        return None
