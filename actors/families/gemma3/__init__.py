"""Gemma 3: SigLIP, pooled."""
