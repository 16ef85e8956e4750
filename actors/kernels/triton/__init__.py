"""Triton kernels for compute capability 8.0 and later: attention, and what runs between GEMMs."""
