"""From bytes and URLs to Media: limits, fetching, file headers. Never decodes."""
