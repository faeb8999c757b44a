"""Results: what methods return, saved, loaded and put into tables."""
