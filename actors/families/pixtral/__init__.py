"""Pixtral and Mistral 3."""
