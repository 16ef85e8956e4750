"""HTTP and gRPC: request bodies in, responses out, errors, authentication, OpenAPI, health."""
