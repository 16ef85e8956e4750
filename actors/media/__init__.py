"""Bytes of images and videos -> uint8 patches: decoding, resizing, patchifying."""
