"""Which scopes a model's layers have."""

from collections.abc import Iterable, Sequence

from torch import nn

from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.models.blocks import Block, Stage
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope
from captum_norm.models.stacks import encoder_of


def check_scopes(name: str, scopes: Sequence[Scope], block: Block) -> None:
    """Refuse scopes that a block does not have; ``name`` is the model's class for messages.

    Raises:
        UnsupportedScopeError: with what the block has, and why if its feed-forward network was not understood.
    """
    have = ", ".join(block.scopes)
    for scope in scopes:
        if scope in block.scopes:
            continue
        if scope in FEED_FORWARD_SCOPES and block.without_feed_forward is not None:
            raise UnsupportedScopeError(
                f'got the scope "{scope}", but in {name} {block.without_feed_forward}. The layer has the scopes {have}'
            )
        raise UnsupportedScopeError(
            f'got the scope "{scope}"; the layers of {name} are {block.layout.style}, which have the scopes {have}'
        )


def require_one_stack(model: nn.Module) -> None:
    """Refuse encoder–decoder models.

    Raises:
        InvalidInputError: for one.
    """
    if encoder_of(model) is not None:
        raise InvalidInputError(
            f"got the encoder–decoder model {type(model).__name__}, whose stacks are arranged in several ways; "
            "expected a model with one stack, such as the encoder alone: model.get_encoder()"
        )


def common_stages(name: str, blocks: Iterable[Block]) -> tuple[Stage, ...]:
    """The stages that all blocks of a model have, whose class is ``name``.

    Raises:
        InvalidInputError: if they differ.
        UnsupportedScopeError: if a feed-forward network was not understood.
    """
    found = set()
    for block in blocks:
        check_scopes(name, ["atb_ff_res"], block)
        found.add(block.stages)
    if len(found) != 1:
        raise InvalidInputError(f"the layers of {name} are arranged in {len(found)} ways; expected one")
    return found.pop()
