"""CLIP and SigLIP on their own."""
