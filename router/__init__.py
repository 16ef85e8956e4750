"""Decides which replica encodes which item. Imports actors, never encoder_service."""
