"""Triton kernels for CUDA, one noun a file. Know tensors: no model, no graph, no configuration."""
