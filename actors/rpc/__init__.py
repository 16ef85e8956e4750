"""gRPC between routers and encoder replicas: messages, codec, and the replica's server."""
