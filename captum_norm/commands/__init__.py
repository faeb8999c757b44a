"""Holds the subcommands of ``captum-norm``, one file each, and what every command line is made of.

The latter is public, ``norm-align`` is made of it too: :class:`~captum_norm.commands.program.Program`,
:class:`~captum_norm.commands.command.Command`, and the files that a command writes,
:mod:`captum_norm.commands.outputs`.

These files import nothing slow at the top, so that ``--help`` answers at once.
"""
