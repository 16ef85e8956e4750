"""The encoder replicas: which exist, whether they are alive, and how they are called."""
