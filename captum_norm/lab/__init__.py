"""Experiments: analyses of a corpus, comparison and evaluation of methods; built on public names alone."""
