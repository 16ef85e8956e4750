"""What the towers share: the transformer block in its forms, patch embeddings and weights."""
