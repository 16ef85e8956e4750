"""Bytes of media -> uint8 patches: decoding, resizing, patchifying."""
