"""gRPC services and stubs straight from the descriptor of a .proto, without generated code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

Method = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
"""Request and context to reply."""


def generic_handler(
    service: ServiceDescriptor, methods: Mapping[str, Method]
) -> grpc.GenericRpcHandler:
    """What a server registers. `methods`: every method of the service, all of them unary."""
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: grpc.unary_unary_rpc_method_handler(
                methods[method.name],
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in service.methods
        },
    )


def stubs(
    service: ServiceDescriptor, channel: grpc.aio.Channel
) -> dict[str, grpc.aio.UnaryUnaryMultiCallable]:
    """What a client calls, by the method's name."""
    return {method.name: _stub(method, channel) for method in service.methods}


def _stub(method: MethodDescriptor, channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable:
    return channel.unary_unary(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
