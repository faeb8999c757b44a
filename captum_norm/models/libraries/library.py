"""Describes a library: how to reach its attention, and the names of its models' arguments."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from captum_norm.models.attention import AttentionFunction

SequencesSeen = Callable[[nn.Module, Callable[[], None]], tuple[Tensor | None, Tensor | None]]
"""From a model and a function that runs it, the first sequence and the decoder's, True at real positions, (B, S)."""


AttentionThrough = Callable[[AttentionFunction], AbstractContextManager[None]]
"""A context in which a function of ours is told of every attention call of a model."""


Towers = tuple[nn.Module, Mapping[str, nn.Module]]
"""The model that reads the tokens, and those beside it that read images or sounds, by kind or by attribute."""


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        models: which of its models can be explained, for messages.
        fits: whether a model is one of this library's.
        observer: from a model to a context in which a function of ours is told of each of its attention calls.
        intercepts: whether a model's attention is intercepted in its own code, not observed where it is looked up.
        halves: encoder and decoder of an encoder–decoder model; None for any other model, including an encoder alone.
        embeddings: the module that embeds the token ids of a model or of one of its halves, if there is one.
        inputs: the arguments that may be the first sequence, the encoder's in an encoder–decoder model, by preference.
        decoder: the arguments that may be the decoder's sequence, by preference.
        decoder_prefixes: how the names of all arguments for the decoder's sequence begin.
        without_decoder: what to do if the decoder's sequence is missing, for messages.
        mask: the argument that is 1 at real positions of the first sequence and 0 at padding; None if the padding id
            among the token ids shows padding.
        decoder_mask: the same for the decoder's sequence.
        signals: those of ``inputs`` that are images or sounds, which the model divides into positions itself.
        with_weights: how to make a model compute its attention weights explicitly, for messages.
        towers: the models inside a model that reads images or sounds beside tokens; None for any other model.
        sequences: finds the sequences in a forward pass; None if the arguments show padding and have the batch first.
    """

    models: str
    fits: Callable[[nn.Module], bool]
    observer: Callable[[nn.Module], AttentionThrough]
    halves: Callable[[nn.Module], tuple[nn.Module, nn.Module] | None]
    embeddings: Callable[[nn.Module], nn.Module | None]
    inputs: tuple[str, ...]
    decoder: tuple[str, ...]
    decoder_prefixes: tuple[str, ...]
    without_decoder: str
    mask: str | None = None
    decoder_mask: str | None = None
    signals: tuple[str, ...] = ()
    with_weights: str = ""
    towers: Callable[[nn.Module], Towers | None] = lambda _: None
    intercepts: Callable[[nn.Module], bool] = lambda _: True
    sequences: SequencesSeen | None = None

    def is_decoders(self, name: str) -> bool:
        """Whether an argument is for the decoder's sequence."""
        return name.startswith(self.decoder_prefixes)


def forward_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of the forward function of a module's class, without ``self``."""
    return _parameters(type(module).forward)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    _, *names = inspect.signature(forward).parameters
    return tuple(names)
