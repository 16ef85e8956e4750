"""Metrics, spans, and request ids in log lines, in every process."""
