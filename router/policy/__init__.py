"""Pure policy: balancing, load, cache affinity, queueing, pools. Knows neither Ray nor torch."""
