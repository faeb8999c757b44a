"""Describes a library: how its attention is reached and what its models' arguments are called."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from captum_norm.models.attention import AttentionFunction


@dataclass(frozen=True)
class SequenceNames:
    """The arguments of a model's forward function that hold one input sequence.

    Attributes:
        main: the sequence itself, several names in order of preference.
        mask: 1 at its real positions and 0 at padding; None where the padding id among the token ids tells them.
        signals: those of ``main`` that are images or sounds, of which the model makes its positions itself.
    """

    main: tuple[str, ...]
    mask: str | None = None
    signals: tuple[str, ...] = ()


SequencesSeen = Callable[[nn.Module, Callable[[], None]], tuple[Tensor | None, Tensor | None]]
"""From a model and a function that runs it, the first sequence and the decoder's, True at real positions, (B, S)."""


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        models: which of its models can be explained, for messages.
        fits: whether a model is one of this library's.
        attention_through: a context in which every attention call of a model runs a function of ours; it leaves the
            model as it was.
        halves: encoder and decoder of an encoder–decoder model; None for any other model, an encoder alone included.
        embeddings: the table of token ids of a model or of one of its halves, if it has one.
        inputs: the first sequence, the encoder's in an encoder–decoder model.
        decoder: the decoder's sequence.
        decoder_prefixes: how the names of all arguments begin that are about the decoder's sequence.
        without_decoder: what to do where the decoder's sequence was not given.
        with_weights: how a model is told to attend by weights that can be explained, for messages.
        sequences: what sees the sequences; None if the arguments tell what is padded and have the batch first.
    """

    models: str
    fits: Callable[[nn.Module], bool]
    attention_through: Callable[[nn.Module, AttentionFunction], AbstractContextManager[None]]
    halves: Callable[[nn.Module], tuple[nn.Module, nn.Module] | None]
    embeddings: Callable[[nn.Module], nn.Module | None]
    inputs: SequenceNames
    decoder: SequenceNames
    decoder_prefixes: tuple[str, ...]
    without_decoder: str
    with_weights: str = ""
    sequences: SequencesSeen | None = None

    def is_decoders(self, name: str) -> bool:
        """Whether an argument is about the decoder's sequence."""
        return name.startswith(self.decoder_prefixes)


def forward_parameters(module: nn.Module) -> tuple[str, ...]:
    """The parameters of the forward function of a module's class, but for ``self``."""
    return _parameters(type(module).forward)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    _, *names = inspect.signature(forward).parameters
    return tuple(names)
