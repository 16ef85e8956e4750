"""Documents as bytes, shared by api and client. Needs no torch."""
