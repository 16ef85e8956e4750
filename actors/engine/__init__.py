"""Waiting items -> packs -> CUDA graph replays -> rows. Imports kernels, models, spec."""
