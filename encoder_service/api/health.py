"""The standard service grpc.health.v1.Health: ready means that an encoder is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2

from actors.errors import ServiceError
from encoder_service.api.grpc import Context, Refused
from encoder_service.service import Service

NAMES = ("", "encoder.v1.Encoder")
WATCH_SECONDS = 1.0
MOST_WATCHES = 4
"""At a time, as each takes one of ingress.max_ongoing_requests and needs no token."""

Response = health_pb2.HealthCheckResponse


class HealthCalls:
    """Open to everybody, as probes send no token."""

    service: Service
    watches = 0

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """SERVING or NOT_SERVING; NOT_FOUND for a service that is not here."""
        if request.service not in NAMES:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"no service {request.service!r}; known are {NAMES}")
            return Response()
        return Response(status=await self.serving())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status, and every change of it, until the client goes or Serve's time limit ends.

        RESOURCE_EXHAUSTED beyond MOST_WATCHES; ends at once for a service that is not here.
        """
        if request.service not in NAMES:
            yield Response(status=Response.SERVICE_UNKNOWN)
            return
        if self.watches >= MOST_WATCHES:
            grpc_context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            grpc_context.set_details(f"{MOST_WATCHES} others watch already: call Check instead")
            raise Refused
        self.watches += 1
        try:
            last = None
            while True:
                status = await self.serving()
                if status != last:
                    yield Response(status=status)
                    last = status
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            self.watches -= 1

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: Context
    ) -> health_pb2.HealthListResponse:
        """The status of each service."""
        status = await self.serving()
        return health_pb2.HealthListResponse(
            statuses={name: Response(status=status) for name in NAMES}
        )

    async def serving(self) -> int:
        """SERVING if an encoder is ready."""
        try:
            await self.service.backend.ready_replicas()
        except ServiceError:
            return int(Response.NOT_SERVING)
        return int(Response.SERVING)
