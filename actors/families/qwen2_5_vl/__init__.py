"""Qwen2.5-VL: Qwen2-VL with attention in windows."""
