"""Linear layers: for each shape the fastest of cuBLASLt's algorithms and of our own kernel."""
