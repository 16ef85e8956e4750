"""One folder per model family: spec.py (no torch), tower.py, presets. There is no other list."""
