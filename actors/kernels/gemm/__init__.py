"""Linear layers by the fastest GEMM for each shape: a cuBLASLt algorithm or our own kernel."""
