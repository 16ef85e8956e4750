"""Brings rows to language models without the front door: memory that other processes open, and a
server of bytes. Knows neither Ray nor vLLM."""
