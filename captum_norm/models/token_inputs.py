"""Runs a model on some examples and tokens of its inputs, and reads the output that methods explain."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_norm.models.call import WATCH, ModelCall
from captum_norm.models.embeddings import ordinary_positions, run_embedded, run_with_embeddings
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.outputs import Position, Readout, read_mask, read_output, real_positions
from captum_norm.models.wrappers import config_of
from captum_norm.results.outputs import NamedOutput

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """Inputs of a model that reads one sequence, for evaluations of one's own; see :func:`bind_tokens`.

    Positions are the model's, which has padding on the left moved to the right.

    Attributes:
        real: True at real positions, (B, S).
        read: True at the position whose output is explained, (B, S); None for the default.
        readout: the output to explain instead of logits, see :data:`captum_norm.models.outputs.Readout`.
    """

    _call: ModelCall
    real: Tensor
    read: Tensor | None
    readout: Readout | None

    def __len__(self) -> int:
        return len(self.real)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._call.model

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the model's forward function, which methods take as inputs, too."""
        return self._call.arguments

    @property
    def tokens(self) -> Sequence[Sequence[str]] | None:
        """The texts of the tokens at the positions of the user's inputs, if these contain them."""
        return self._call.positions.texts

    def take(self, examples: Tensor, places: Tensor, real: Tensor | None = None) -> "TokenInputs":
        """Return some examples, one of which may come several times, with the tokens at some places of each.

        Args:
            examples: their indices, (N,).
            places: the places, (N, S').
            real: True at places that stay real, (N, S'); all others become padding. None: as they are.
        """

        def chosen(value: Tensor) -> Tensor:
            index = examples.to(value.device)
            sequence = value.dim() > 1 and value.shape[1] == self.real.shape[1]
            return value[index[:, None], places.to(value.device)] if sequence else value[index]

        call = self._call.map_batched(chosen, examples.tolist())
        arguments, padding = dict(call.arguments), getattr(config_of(self.model), "pad_token_id", None)
        if real is not None:
            arguments[str(call.library.mask)] = real.long()
            # Some classifiers find the last token by the padding id, not by the mask.
            if arguments.get("input_ids") is not None and padding is not None:
                arguments["input_ids"] = arguments["input_ids"].masked_fill(~real, padding)
        positions = replace(call.positions, length=places.shape[1], shift=None)
        call = replace(call, arguments=arguments, positions=positions, last=None)
        read = None if self.read is None else chosen(self.read)
        return TokenInputs(call, chosen(self.real) if real is None else real, read, self.readout)

    def run(self, change: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Run the model in ``eval()``, without gradients; ``change`` is applied to the embeddings, (B, S, D)."""
        with torch.no_grad(), evaluating(self.model):
            return self._call.run() if change is None else run_with_embeddings(self._call, change)

    def embeddings(self) -> Tensor:
        """Return the tokens' embeddings, (B, S, D)."""
        with torch.no_grad(), evaluating(self.model):
            return run_embedded(self._call)[1]

    def scores(self, output: Any) -> Tensor:
        """Return the scores to explain in what the model returned: (B, C), or (B,).

        Raises:
            UnsupportedModelError: the model returns no logits.
            InvalidInputError: the position to read is missing, or the readout returned another shape.
        """
        return read_output(self.model, output, self.real, self.read, self.readout)

    def ordinary(self, special_ids: Collection[int]) -> Tensor:
        """Return True at real tokens that are not special, (B, S).

        Raises:
            InvalidInputError: there are special ids, but embeddings for inputs.
        """
        return ordinary_positions(self._call, self.real, special_ids)

    def to_user(self, rows: Tensor) -> Tensor:
        """Move numbers of all positions, (B, S, ...), to the positions of the user's inputs."""
        return self._call.positions.shift_back(rows, 1)

    def to_model(self, rows: Tensor) -> Tensor:
        """Move numbers of all positions of the user's inputs, (B, S, ...), to the model's positions."""
        moved: Tensor = self._call.positions.shift_left(rows)
        return moved


def bind_tokens(
    model: nn.Module,
    inputs: Inputs,
    additional_forward_args: Any = None,
    *,
    tokenizer: Any = None,
    position: Position = None,
    readout: Readout | None = None,
) -> TokenInputs:
    """Bind inputs to a model that reads one sequence.

    Args:
        model: the model.
        inputs: as for :meth:`captum_norm.NormAttribution.maps`.
        additional_forward_args: the model's further positional arguments (attention mask first).
        tokenizer: turns texts into arguments.
        position: where to read the output if every position has one: an index of the user's inputs, or one for each
            example; None for the last real position.
        readout: the output to explain instead of logits, see :data:`captum_norm.models.outputs.Readout`.

    Raises:
        InvalidInputError: the inputs do not fit the model, or the position is outside the sequence or padding.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
        >>> bound = bind_tokens(model, torch.tensor([[2, 7, 9, 3]]))
        >>> bound.scores(bound.run()).shape, bound.scores(bound.run(torch.zeros_like)).shape
        (torch.Size([1, 2]), torch.Size([1, 2]))
    """
    call = bind_inputs(model, inputs, additional_forward_args, tokenizer=tokenizer)
    return TokenInputs(call, real_positions(call), read_mask(call, position), readout)


def with_outputs(
    work: Callable[[], T], name: Callable[[ModelCall, Any], list[NamedOutput] | None], model: nn.Module, inputs: Inputs
) -> tuple[T, list[NamedOutput]]:
    """Let a method run the model, and name the outputs in the first of its calls of which ``name`` returns some."""
    seen: list[list[NamedOutput]] = []

    def see(call: ModelCall, output: Any) -> None:
        named = None if seen else name(call, output)
        if named is not None:
            seen.append(named)

    token = WATCH.set(see)
    try:
        result = work()
    finally:
        WATCH.reset(token)
    if not seen:  # the method runs no whole pass over all examples, or is one of another package
        call = bind_inputs(model, inputs)
        with torch.no_grad(), evaluating(model):
            see(call, call.run())
    return result, seen[0]
