"""Kimi-K2.5: Kimi-VL's tower, with videos."""
