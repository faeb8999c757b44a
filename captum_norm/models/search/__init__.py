"""Finds the structure of a model from what one forward pass shows; no family is named here."""
