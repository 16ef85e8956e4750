"""Brings rows to other processes without Ray: memory that routers borrow from or language models
copy from, and a server of bytes. Knows neither Ray nor vLLM."""
