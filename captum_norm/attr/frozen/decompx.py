"""Decomposes hidden states, or any output value, into contributions of the tokens: DecompX."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Never, get_args

import torch
from torch import Tensor

from captum_norm.attr.frozen.components import ComponentRequest
from captum_norm.attr.frozen.parts import PartsNetwork, propagated
from captum_norm.attr.frozen.rules import DECOMPX
from captum_norm.attr.layer_maps import LayerMap, finite_results, stacked_maps
from captum_norm.attr.output import Decomposition, RelevanceAttribution, sequences
from captum_norm.bars import bar
from captum_norm.checks import check_bool, check_choice, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.forward.request import Request, layer_indices
from captum_norm.functional import length, relative_error
from captum_norm.models.call import ModelCall, Positions
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import OutputValues, Readout
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.stacks import Role
from captum_norm.results.maps import AttributionMaps, MapUnits

Bias = Literal["apart", "absdot", "abssim", "norm", "equal", "cls"]
Norms = tuple[Tensor, Tensor, Tensor]
"""Of one layer's output: the norms of the tokens' parts, (K, Q), what remains, (Q, D), and the output's norm, (Q,)."""


class DecompX(RelevanceAttribution):
    """DecompX [Modarressi et al. 2023], to hidden states and to any output value, through pooler and head.

    With attention weights, norm statistics, routing and activation slopes frozen, the network is linear in the tokens'
    vectors from the first layer's input on. A slope is (g(z) − g(0)) / z, the paper's zero-origin line; in a gated
    feed-forward network both factors share their product along the straight path from zero.

    ``attribute`` returns each token's signed contribution to an output value, the model's prediction unless ``target``
    or ``readout`` names another: one backward pass of the frozen network, gradient × input. ``maps`` propagates vectors
    and returns the norms of the tokens' contributions to every layer's output. So does ``attribute`` with ``layer=`` at
    the explained position, -1 for the last hidden state, which is also explained if the model has no head.

    In an encoder–decoder model, what enters the first layers of encoder and decoder is decomposed together: source and
    target prefix have parts in every decoder state and in the output. ``cross`` holds the source's parts of a decoder
    layer's output, ``decoder`` the prefix's.

    Args:
        model: a Hugging Face or fairseq model, or one built with torch.nn's attention; left unchanged.
        bias: treatment of biases. ``"apart"``: a part of their own. The paper's other treatments share each bias among
            the tokens' vectors where it is added (attention's before the residual connection): in proportion to their
            products with it (``"absdot"``), their cosines (``"abssim"``) or their norms (``"norm"``), equally
            (``"equal"``), or all to the first token (``"cls"``). These propagate all tokens' vectors together.
        propagate: propagate vectors to the output, too, instead of taking gradients: the same numbers, at (S + 2)
            times the cost of a forward pass.
        readout: the values to explain instead of logits, linear in the hidden states: see
            :data:`captum_norm.models.outputs.Readout`.
        memory_budget: bytes that propagated vectors may take at a time; None: a quarter of the free memory.
        tokenizer: see :class:`captum_norm.forward.session.MeterOptions`.

    Raises:
        InvalidInputError: for an unknown treatment of biases.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> method, ids = DecompX(BertForSequenceClassification(config)), torch.tensor([[2, 7, 9, 3]])
        >>> parts = method.decompose(ids, target=1)
        >>> bool((parts.scores.sum(1) + parts.bias - parts.number).abs().max() < 1e-5)
        True
    """

    name, target = "decompx", "optional"
    rules = DECOMPX
    mapped = True
    _cumulative = True
    units = MapUnits("norm", "norm", aggregation="propagated", target="part of the output")

    def __init__(
        self,
        model: Explainable,
        bias: Bias = "apart",
        *,
        propagate: bool = False,
        readout: Readout | None = None,
        memory_budget: int | None = None,
        tokenizer: Any = None,
        **unknown: Never,
    ) -> None:
        super().__init__(model, readout=readout, tokenizer=tokenizer, memory_budget=memory_budget, **unknown)
        self.bias: Bias = check_choice("bias", bias, get_args(Bias))
        self._sharing = None if bias == "apart" else bias
        self._propagate = check_bool("propagate", propagate) or bias != "apart"

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the norms of the tokens' contributions to the layers requested."""
        call = self._prepared(call)
        parts, network = self._layers(call)
        maps = dict[Role, list[tuple[int, LayerMap]]]()
        for role, (first, end, tokens) in self._stacks(call, len(parts[0]), network.lengths).items():
            if request.has_stack(role):
                indices = layer_indices(request.layers, end - first)
                chosen = [[example[first + index] for index in indices] for example in parts]
                norms, rest, size = (
                    torch.stack([torch.stack([layer[part] for layer in example]) for example in chosen])
                    for part in range(3)
                )
                norms = norms[:, :, tokens].transpose(2, 3)
                deltas = self._deltas(length(rest), size, call.positions_of(role)[0])
                maps[role] = list(zip(indices, map(LayerMap, norms.unbind(1), deltas.unbind(1)), strict=True))
        return stacked_maps(call, maps, causal=network.stacks.causal)

    def _stacks(self, call: ModelCall, layers: int, lengths: Sequence[int]) -> dict[Role, tuple[int, int, slice]]:
        """Each stack's first and last layer, of all in the order of their calls, and the tokens that its maps show."""
        if call.encoder is None:
            return {"self": (0, layers, slice(None))}
        encoder, source = self.session.sizes(call)["encoder"].layers, slice(0, lengths[0])
        return {
            "encoder": (0, encoder, source),
            "decoder": (encoder, layers, slice(lengths[0], None)),
            "cross": (encoder, layers, source),
        }

    def _bar(self, call: ModelCall) -> AbstractContextManager[Any]:
        """Return a progress bar over the tokens of all examples."""
        lengths = [positions.length for positions in sequences(call)]
        tokens = None if None in lengths else call.batch * sum(length or 0 for length in lengths)
        return bar(f"parts of {self.session.name}", tokens, "tokens")

    def _propagated(self, call: ModelCall, values: OutputValues, components: ComponentRequest | None) -> Decomposition:
        """Decompose the values by propagating the tokens' parts to the output."""
        if components is not None:
            raise InvalidInputError(
                f"got components={quoted(components.kinds)} of DecompX that propagates parts; components are read from "
                'gradients: leave out propagate= and take bias="apart"'
            )
        modules, lengths, deviations = self._hooked_modules(call), list[int](), list[tuple[str, Tensor]]()
        examples = []
        chosen = self._sharing, self.session.options.budget
        with self._bar(call) as shown:
            for index, example in enumerate(examples_of(call)):
                scores = []
                for output, network in propagated(modules, example, *chosen, shown.update):
                    numbers, rounded = values.of_example(index).read(network.call, output)
                    numbers = numbers.to(accumulation_dtype(numbers.dtype))
                    scores.append(numbers[1:-1])
                    lengths = network.lengths
                    deviations.append(network.largest_deviation())
                examples.append((torch.cat(scores).T, numbers[-1], numbers[0], rounded[0].to(numbers)))
        parts = [torch.stack(part) for part in zip(*examples, strict=True)]
        if values.together:
            parts = [part.sum(1, keepdim=True) for part in parts]
        of_tokens, bias, number, rounded = parts
        halves, largest = list(of_tokens.split(lengths, 2)), max(deviations, key=lambda noted: noted[1])
        return self._checked(call, halves, bias, number, rounded, largest)

    def _layers(self, call: ModelCall) -> tuple[list[list[Norms]], PartsNetwork]:
        """Compute each example's norms of every layer; return the network that was run last, too."""
        modules, examples = self._hooked_modules(call), list[list[Norms]]()

        def watch(layer: int, copies: Tensor) -> None:
            copies, layers = copies.to(accumulation_dtype(copies.dtype)), examples[-1]
            total, norms = copies[1:-1].sum(0), length(copies[1:-1])
            if layer < len(layers):  # some tokens have been propagated before
                before, rest, size = layers[layer]
                layers[layer] = torch.cat([before, norms]), rest - total, size
            else:
                layers.append((norms, copies[0] - copies[-1] - total, length(copies[0])))

        chosen = self._sharing, self.session.options.budget
        with self._bar(call) as shown:
            for example in examples_of(call):
                examples.append([])
                for _, network in propagated(modules, example, *chosen, shown.update, watch):
                    self._expect_agreement(network.largest_deviation())
        return examples, network

    def _deltas(self, error: Tensor, size: Tensor, queries: Positions) -> Tensor:
        """Compute the layers' completeness errors, (B, L), from norms (B, L, Q)."""
        real = None if queries.real is None else queries.real[:, None].expand(error.shape).flatten(0, 1)
        delta = relative_error(error.flatten(0, 1), size.flatten(0, 1), real).reshape(error.shape[:2])
        finite_results(self.model, delta)
        self._accept(delta, f"the parts of the hidden states of {type(self.model).__name__} do not add up")
        return delta


def examples_of(call: ModelCall) -> Iterator[ModelCall]:
    """Cut a call to each of its examples."""
    if call.library.sequences is not None and 1 < call.batch in (call.positions.length, call.decoder.length):
        raise InvalidInputError(
            f"got {call.batch} examples of {call.batch} positions, so it is unknown which axis of "
            f"{type(call.model).__name__}'s arguments is the examples'; pass them one at a time"
        )
    return map(call.example, range(call.batch))
