"""Measures the engine by itself: from pixel patches on the device to embeddings on the device."""
