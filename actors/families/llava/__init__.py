"""LLaVA 1.5 and its relatives: CLIP or SigLIP with a projector."""
