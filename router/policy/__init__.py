"""Pure policy: balancing, load, cache affinity, coalescing. Knows neither Ray nor torch."""
