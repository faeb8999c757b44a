"""The subcommands of ``captum-norm``: one file each, listed in :data:`captum_norm.cli.COMMANDS`.

These files import nothing slow at the top, so that ``--help`` answers at once.
"""
