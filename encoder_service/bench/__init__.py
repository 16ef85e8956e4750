"""Benchmarks: the whole service on a private Ray cluster, and one device without Ray."""
