"""Text: lines of files, words, pieces of words."""
