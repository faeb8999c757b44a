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
    """One library: functions of its models, and the names of their arguments, those preferred first."""

    models: str  # which can be explained, for messages
    fits: Callable[[nn.Module], bool]  # whether a model is one of this library's
    observer: Callable[[nn.Module], AttentionThrough]
    halves: Callable[[nn.Module], tuple[nn.Module, nn.Module] | None]  # encoder and decoder, if it has both
    embeddings: Callable[[nn.Module], nn.Module | None]  # what embeds the token ids of a model, or of one half
    inputs: tuple[str, ...]  # arguments that may be the first sequence, the encoder's if there is one
    decoder: tuple[str, ...]  # those that may be the decoder's sequence
    decoder_prefixes: tuple[str, ...]  # how the names of all arguments for the decoder's sequence begin
    without_decoder: str  # what to do if that sequence is missing, for messages
    mask: str | None = None  # the argument that is 1 at real positions; None if the padding id shows padding
    decoder_mask: str | None = None
    signals: tuple[str, ...] = ()  # those of the inputs that the model divides into positions: images or sounds
    with_weights: str = ""  # how to make a model compute its attention weights explicitly, for messages
    towers: Callable[[nn.Module], Towers | None] = lambda _: None  # None if it reads no images or sounds beside tokens
    intercepts: Callable[[nn.Module], bool] = lambda _: True  # whether in its own code, not where it is looked up
    sequences: SequencesSeen | None = None  # None if the arguments show padding and have the batch first

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
