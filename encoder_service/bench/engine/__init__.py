"""Benchmarks of the engine alone, on one device."""
