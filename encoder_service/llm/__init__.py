"""A language model behind the encoders: chat completions from their embeddings.

api/http.py -> http.py -> ingress.ChatFleet (Serve handle) -> chat.py, which tokenises while the
Router encodes, inserts the embeddings, and generates (model.py or vllm_engine.py). OpenAI's other
API, vectors of images and texts, needs no language model: embeddings.py.
"""
