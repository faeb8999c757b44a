"""The attribution methods, one per file."""
