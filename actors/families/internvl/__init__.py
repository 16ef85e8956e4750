"""InternVL 2 to 3.5, under both schemes of tensor names."""
