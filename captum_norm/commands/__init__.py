"""The subcommands of ``captum-norm``, a file for each, and what they share with ``norm-align``.

:mod:`captum_norm.commands.program` declares options and runs a command line, :mod:`captum_norm.commands.shared` has the
options and files that several commands share. These files import slow packages inside functions, so ``--help`` is fast.
"""
