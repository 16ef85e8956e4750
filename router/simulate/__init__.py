"""The same policies in simulated time."""
