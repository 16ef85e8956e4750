"""Benchmarks of the whole service on a private Ray cluster, and of one device without Ray."""
