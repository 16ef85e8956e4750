"""Llama 4, Scout and Maverick."""
