"""Kimi-VL, whose tower is MoonViT."""
