"""Requests and responses as bytes, shared by api/ and client/. Needs neither torch nor Ray."""
