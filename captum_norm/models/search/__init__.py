"""Finds the structure of a model from one forward pass; no model family is named here."""
