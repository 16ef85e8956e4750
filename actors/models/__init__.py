"""One file a family: a thin static-shape forward over its weights."""
