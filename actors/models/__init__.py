"""Towers of three kinds (packed, tiled, views), the layers that they share, and their weights."""
