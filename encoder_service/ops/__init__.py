"""For operators: metrics, the status document and page, the access log."""
