"""Draws the plots of an analysis, and writes its report."""
