"""From bytes and URLs to Media: limits, fetching, file headers. Nothing is decoded here."""
