"""PaddleOCR-VL: SigLIP at any size."""
