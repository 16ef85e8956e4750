"""Metrics, spans and the request that a log line is about, in every process."""
