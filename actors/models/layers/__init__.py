"""What towers are built of: the transformer block, positions, patches and mergers, weights."""
