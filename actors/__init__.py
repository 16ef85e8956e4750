"""The GPU side: from compressed bytes to embeddings. Imports neither router nor encoder_service."""
