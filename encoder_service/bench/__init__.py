"""Benchmarks: the whole service on a private Ray cluster; in engine/, one device without Ray."""
