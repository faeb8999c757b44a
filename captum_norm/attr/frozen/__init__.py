"""The frozen network: with attention, norms and activations frozen, a model is linear in its input vectors."""
