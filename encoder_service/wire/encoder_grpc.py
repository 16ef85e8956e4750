"""The gRPC service of encoder.proto: a stub for callers and handlers for servers.

Made from the descriptor, so that only the messages (encoder_pb2.py) are generated.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from encoder_service.wire import encoder_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Encoder"]


class EncoderStub:
    """Calls over a channel of grpc or grpc.aio, one per method of the service."""

    Encode: Any
    EncodeStream: Any
    Plan: Any
    Fetch: Any
    Release: Any
    GetModel: Any

    def __init__(self, channel: Any) -> None:
        for method in SERVICE.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)


def add_EncoderServicer_to_server(servicer: Any, server: Any) -> None:
    """Registers an object that has the service's methods; Serve is given this function by name."""
    handlers = {}
    for method in SERVICE.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    generic = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    server.add_registered_method_handlers(SERVICE.full_name, handlers)
