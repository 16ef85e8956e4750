"""Measures a whole service on a private Ray cluster of its own."""
