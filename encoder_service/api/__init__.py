"""HTTP and gRPC: bodies in, responses out, errors, authentication, health."""
