"""The subcommands of ``captum-norm``, a file for each, and the parts of a command line.

The parts are public, since ``norm-align`` uses them, too: :class:`~captum_norm.commands.program.Program`,
:class:`~captum_norm.commands.command.Command`, and the output files of a command, :mod:`captum_norm.commands.outputs`.

These files import slow packages inside functions, so ``--help`` is fast.
"""
