"""Embeddings outside the engine: shared memory, the cache, references."""
