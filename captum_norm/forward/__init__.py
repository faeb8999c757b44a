"""Runs a model once and hands on what passes through its attention layers."""
