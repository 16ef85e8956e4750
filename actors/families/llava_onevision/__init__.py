"""LLaVA-OneVision, under both schemes of tensor names."""
