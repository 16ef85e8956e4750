"""How rows reach language models past the front door: memory that other processes open, and a
server of bytes. Knows neither Ray nor vLLM."""
