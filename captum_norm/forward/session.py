"""Understands a model once, and runs it as often as asked; the model is left as it was."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from captum_norm.bars import bar, bars_shown
from captum_norm.checks import check_bool, check_choice, check_count
from captum_norm.errors import (
    IncompleteDecompositionError,
    NonFiniteError,
    UnsupportedModelError,
    UnsupportedScopeError,
)
from captum_norm.forward.checks import refuse_autocast, refuse_non_finite_weights
from captum_norm.forward.record import Layer, Options, Recording, no_bar, record
from captum_norm.forward.request import Request, as_stacks, check_seen, layer_indices
from captum_norm.forward.room import expect_room, may_be_large, total_queries
from captum_norm.functional import Baseline
from captum_norm.memory import MemoryBudget
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.layers import on_excerpt, stack_sizes, verify
from captum_norm.models.libraries.adapters import norms_taken_once
from captum_norm.models.libraries.refusals import refusal_of
from captum_norm.models.model import Model, understand
from captum_norm.models.objects import Explainable, opened
from captum_norm.models.search.attention_blocks import find_blocks
from captum_norm.models.stacks import Place, Role, Sizes
from captum_norm.models.wrappers import class_of

Result = TypeVar("Result")
Blocks = Mapping[nn.Module, Block]
"""The attention blocks of a model, by the modules that attend."""


class Session:
    """A model, understood once and run as often as asked.

    Args:
        model: a model of Hugging Face, one built with torch.nn's attention, or a translation model of fairseq, in any
            mode and dtype, on any device; a pipeline of transformers; or a SentenceTransformer. Left as it is.
        tokenizer: see :class:`captum_norm.MeterOptions`.
        accumulate: see :class:`captum_norm.MeterOptions`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        baseline: see :class:`captum_norm.MeterOptions`.
        differentiable: see :class:`captum_norm.MeterOptions`.

    Raises:
        InvalidInputError: for a model of another kind, or an unknown option.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> session = Session(BertModel(config))
        >>> call = session.bind(torch.tensor([[2, 7, 9, 3]]))
        >>> [block.layout.style for block in session.blocks(call).values()]
        ['post-norm', 'post-norm']
    """

    def __init__(
        self,
        model: Explainable,
        *,
        tokenizer: Any = None,
        accumulate: torch.dtype = torch.float32,
        memory_budget: int | None = None,
        baseline: Baseline = "zero",
        differentiable: bool = False,
    ) -> None:
        self.model, self.tokenizer = opened(model, tokenizer)
        self.options = Options(
            check_choice("accumulate", accumulate, (torch.float32, torch.float64)),
            MemoryBudget(None if memory_budget is None else check_count("memory_budget", memory_budget)),
            check_choice("baseline", baseline, get_args(Baseline)),
        )
        self.differentiable = check_bool("differentiable", differentiable)
        self._blocks: Blocks | None = None
        self._facts: Model | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What is known about a model does not leave the process.
        return vars(self) | {"_blocks": None, "_facts": None}

    @property
    def name(self) -> str:
        """Class of the model, for messages."""
        return class_of(self.model).__name__

    def bind(
        self, inputs: Inputs, additional_forward_args: Any = None, stacks: Collection[Role] | None = None
    ) -> ModelCall:
        """Bind inputs to the model; at its first call, see its stacks of layers.

        Args:
            inputs: see :meth:`captum_norm.NormMeter.measure`.
            additional_forward_args: the model's further positional arguments (attention mask first).
            stacks: the stacks to explain of a model with towers; if None, those that read the tokens.

        Raises:
            InvalidInputError: the inputs do not fit the model.
            UnsupportedModelError: the model computes something else than with attention weights.
            NonFiniteError: its weights contain NaN or infinity.
        """
        facts = understand(self.model)
        if stacks is not None and facts.has_towers:
            facts = understand(self.model, frozenset(stacks))
        call = bind_inputs(facts, inputs, additional_forward_args, self.tokenizer)
        if facts.excerpt.sizes is None:
            with self._naming_reasons(), norms_taken_once(self.model):
                verify(call)
        if facts is not self._facts:
            self._facts, self._blocks = facts, None
        return call

    def roles(self, stacks: object) -> list[Role] | None:
        """Check the names of the stacks to explain; None stays None."""
        return None if stacks is None else as_stacks(understand(self.model), stacks)

    def sizes(self, call: ModelCall) -> Sizes:
        """Sizes of the model's stacks, seen on an excerpt.

        Raises:
            UnsupportedModelError: if no attention was seen.
        """
        sizes = stack_sizes(call)
        if not sizes:
            raise UnsupportedModelError(call.unseen)
        return sizes

    def blocks(self, call: ModelCall, *, feed_forward: bool = False) -> Blocks:
        """The model's attention blocks, found on first use.

        Args:
            call: any call of the model; its inputs do not change the answer.
            feed_forward: with the feed-forward blocks behind them.

        Raises:
            UnsupportedModelError: the model's attention blocks could not be understood.
        """
        refuse_autocast(self.model)
        known = self._blocks
        if known is None or (feed_forward and not all(block.searched for block in known.values())):
            try:
                known = on_excerpt(call, lambda excerpt: find_blocks(excerpt, feed_forward=feed_forward))
            except UnsupportedModelError:
                refuse_non_finite_weights(self.model)
                raise
            self._blocks = known
        return known

    def explain(self, work: Callable[[], Result]) -> Result:
        """Do some work with the model's blocks; if known blocks do not hold any more, find them anew and repeat.

        Weights written through ``.data`` and modules that were exchanged leave no trace.
        """
        known = self._blocks is not None
        kept = nullcontext() if known else norms_taken_once(self.model)
        with torch.set_grad_enabled(self.differentiable), self._naming_reasons():
            try:
                with kept:
                    return work()
            except (IncompleteDecompositionError, UnsupportedModelError):
                if not known:
                    raise
                self._blocks = None
                return work()

    def record(
        self,
        call: ModelCall,
        request: Request,
        reduce: Callable[[Layer], Result],
        blocks: Blocks | None = None,
        *,
        feed_forward: bool = False,
        passes: int = 1,
    ) -> Recording[Result]:
        """Run the model once and reduce the layers requested, each as soon as its tensors exist.

        Args:
            call: of the model.
            request: which layers.
            reduce: makes a layer's result.
            blocks: the model's blocks; None if only attention weights are needed.
            feed_forward: also record the tensors of the feed-forward blocks.
            passes: how often ``reduce`` treats each query, for the progress bar.

        Returns:
            for each stack requested, its layers in the order of the request.

        Raises:
            NotEnoughMemoryError: the maps requested take more memory than is free.
            UnsupportedModelError: a stack that was requested was not seen.
            CaptumNormError: a check of the layers fails.
        """
        self.expect_room(call, request)
        chosen, stacks = dict[Role, list[int]](), request.stacks
        if request.layers is not None:
            chosen = {role: layer_indices(request.layers, size.layers) for role, size in self.sizes(call).items()}

        def is_chosen(place: Place) -> bool:
            some = request.layers is None or place.index in chosen.get(place.role, ())
            return some and (stacks is None or place.role in stacks)

        with self._progress(call, is_chosen, passes) as advance:
            found, causal = record(
                call,
                reduce,
                self.options,
                blocks,
                chosen=is_chosen,
                feed_forward=feed_forward,
                advance=advance,
            )
        check_seen(call, found, request)
        if request.layers is None:
            return Recording(found, causal)
        by_number = {role: dict(layers) for role, layers in found.items()}
        ordered = {role: [(number, layers[number]) for number in chosen[role]] for role, layers in by_number.items()}
        return Recording(ordered, causal)

    def expect_room(self, call: ModelCall, request: Request) -> None:
        """Refuse maps that will not fit in memory.

        Raises:
            NotEnoughMemoryError: if they will not.
        """
        if may_be_large(call):
            expect_room(call, request, self.sizes(call), self.options.accumulate)

    @contextmanager
    def _progress(
        self, call: ModelCall, chosen: Callable[[Place], bool], passes: int
    ) -> Iterator[Callable[[int], object]]:
        """Show a bar over the queries of some layers, each treated in so many passes."""
        if not passes or not bars_shown():
            yield no_bar
            return
        with bar(self.name, passes * total_queries(call, self.sizes(call), chosen), "queries") as shown:
            yield shown.update

    @contextmanager
    def _naming_reasons(self) -> Iterator[None]:
        """Give the reason of a refusal: a weight with NaN or infinity, or what is known of the architecture."""
        try:
            yield
        except (IncompleteDecompositionError, UnsupportedModelError) as error:
            reason = refusal_of(self.model)
            if reason is None:
                raise
            raise UnsupportedModelError(f"{self.name} is not supported: {reason}") from error
        except (NonFiniteError, UnsupportedScopeError):
            refuse_non_finite_weights(self.model)
            raise
