"""Towers of four kinds (packed, tiled, views, conformers), their shared layers and weights."""
