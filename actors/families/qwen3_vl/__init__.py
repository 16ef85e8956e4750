"""Qwen3-VL and Qwen3.5, dense and MoE."""
