"""Data files alone: the translation models that ``alignment.load_shipped_model`` loads."""
