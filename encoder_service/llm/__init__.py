"""A language model downstream of the encoders: chat completions from their embeddings.

ingress ── Chat ── Router ── Encoder
  |          |
  limits     tokenises while the encoders work, places the embeddings, generates
"""
