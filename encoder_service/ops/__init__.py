"""What operators look at: metrics, the status page, the access log."""
