"""The subcommands of ``norm-align``, one file each; :mod:`alignment.cli` lists them."""
