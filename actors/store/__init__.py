"""Embeddings outside the engine: Ray's shared memory, the cache, references."""
