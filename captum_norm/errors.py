"""The exceptions; every message says what was got, what was expected and what to do."""


class CaptumNormError(Exception):
    """Base class of all errors that captum-norm raises deliberately."""


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
