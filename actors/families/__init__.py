"""One folder per model family: spec.py (no torch), tower.py, presets. The folders are the list."""
