"""The recipe of the French-English translation models whose cross-attention is evaluated as word alignments."""
