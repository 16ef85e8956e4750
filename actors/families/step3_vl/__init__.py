"""Step3, Step3-VL-10B and Step-3.7, over the whole image and its crops."""
