"""The encoder replicas: which there are, whether they live, and how they are called."""
