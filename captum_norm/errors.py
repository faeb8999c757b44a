"""Defines the exceptions; every message says what was got, what was expected and what to do."""


class CaptumNormError(Exception):
    """Base class of every error that captum-norm raises on purpose."""


class InvalidInputError(CaptumNormError, ValueError):
    """The inputs or options do not fit the model or the method."""


class UnsupportedModelError(CaptumNormError):
    """The parts of the model's attention blocks could not be found, or do not reproduce its output."""


class UnsupportedScopeError(CaptumNormError, ValueError):
    """The scope asked for does not exist in this model's layers."""


class IncompleteDecompositionError(CaptumNormError, ArithmeticError):
    """The vectors of a layer do not add up to what the model computed."""


class NonFiniteError(CaptumNormError, ArithmeticError):
    """The model's weights or activations contain NaN or infinity."""


class NotEnoughMemoryError(CaptumNormError, MemoryError):
    """What was asked for does not fit the memory that is free."""


class MissingGlyphsWarning(UserWarning):
    """A picture has boxes for characters that no font at hand has."""
