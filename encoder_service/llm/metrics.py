"""The series of a language model's replica."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class ChatMetrics:
    """Declared here and nowhere else."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "encoder_chat_answers_total",
            "Answers, by their end: stop, length, cancelled or failed.",
            ("finish",),
            registry=self.registry,
        )
        self.tokens = Counter(
            "encoder_chat_tokens_total",
            "Tokens of answered requests: of the prompt, images included, and of the completion.",
            ("kind",),
            registry=self.registry,
        )
        self.encode_seconds = Histogram(
            "encoder_chat_encode_seconds",
            "From a request with images to all its embeddings, tokenised meanwhile.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "encoder_chat_first_token_seconds",
            "From a request to the first text of its answer, its turn waited for.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def text(self) -> str:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry).decode()
