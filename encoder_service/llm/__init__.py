"""Chat completions by a language model that takes the encoders' embeddings.

A request passes api/http.py, http.py, ingress.ChatFleet (a Serve handle) and chat.py, which
tokenises while the Router encodes, inserts the embeddings, and generates (model.py or
vllm_engine.py). embeddings.py serves OpenAI's embeddings API, which needs no language model.
"""
