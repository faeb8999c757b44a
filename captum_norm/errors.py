"""The exceptions; each message says what was passed, what was expected and how to fix it."""


class CaptumNormError(Exception):
    r"""Base class of all errors that captum-norm raises deliberately; names in messages do not control the terminal.

    >>> str(CaptumNormError("got \x1b[31m"))
    'got \\x1b[31m'
    """

    def __init__(self, message: str = "") -> None:
        plain = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(plain))


class InvalidInputError(CaptumNormError, ValueError):
    """The inputs or options do not fit the model or the method."""


class UnsupportedModelError(CaptumNormError):
    """The parts of the model's attention blocks were not found, or do not reproduce its output."""


class UnsupportedScopeError(CaptumNormError, ValueError):
    """The model's layers do not have the requested scope."""


class IncompleteDecompositionError(CaptumNormError, ArithmeticError):
    """The vectors of a layer do not sum to the output that the model computed."""


class NonFiniteError(CaptumNormError, ArithmeticError):
    """The model's weights or activations contain NaN or infinity."""


class MethodError(CaptumNormError, RuntimeError):
    """A method of one's own failed, or did not return a map."""


class NotEnoughMemoryError(CaptumNormError, MemoryError):
    """The request does not fit into the free memory."""
