"""Embeddings for other people's language model servers: vLLM and SGLang."""
