"""Intercepts the attention of each library's models."""
