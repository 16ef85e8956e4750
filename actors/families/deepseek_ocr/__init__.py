"""DeepSeek-OCR: SAM, then CLIP, over the whole image and its crops."""
