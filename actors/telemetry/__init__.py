"""Metrics, tracing and logs of every process."""
