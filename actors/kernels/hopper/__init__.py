"""Kernels in CUDA C++ for compute capability 9.0 (H100, H200), compiled when a replica starts."""
