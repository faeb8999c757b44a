"""Draws what an analysis found: its plots, and a report in a folder."""
