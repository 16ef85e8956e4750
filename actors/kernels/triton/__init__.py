"""Triton kernels, for compute capability 8.0 and later: attention, what runs between GEMMs."""
