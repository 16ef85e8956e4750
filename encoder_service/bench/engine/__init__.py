"""Benchmarks of one engine on one device, without Ray."""
