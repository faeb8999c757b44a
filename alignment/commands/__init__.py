"""Holds the subcommands of ``norm-align``: one file each, listed in :mod:`alignment.cli`."""
