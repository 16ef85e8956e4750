"""Other people's language model servers: vLLM and SGLang."""
