"""Explains by the frozen network: a model with attention, norms and activations frozen is linear in its vectors."""
