"""Kernels in Triton, for every CUDA device: attention, and what runs between the GEMMs."""
