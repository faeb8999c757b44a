"""Understands a model once, and runs it as often as asked; the model is left as it was."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from inspect import signature
from typing import Any, TypedDict, TypeVar, get_args

import torch
from torch import nn

from captum_norm.bars import DISPLAY, bar
from captum_norm.checks import check_bool, check_choice, check_count, did_you_mean
from captum_norm.errors import (
    CaptumNormError,
    IncompleteDecompositionError,
    InvalidInputError,
    NonFiniteError,
    UnsupportedModelError,
    UnsupportedScopeError,
)
from captum_norm.forward.record import Layer, Options, Recording, no_bar, record
from captum_norm.forward.request import Request, as_stacks, expect_room, layer_indices, total_queries
from captum_norm.functional.feed_forward import Baseline
from captum_norm.memory import MemoryBudget
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import hooks_of_users
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.layers import on_excerpt, see_at_length, seen
from captum_norm.models.libraries.adapters import norms_taken_once
from captum_norm.models.model import Excerpt, Model, refusal_of, refuse_mixing, understand
from captum_norm.models.objects import Explainable, opened
from captum_norm.models.offloading import loaded
from captum_norm.models.search.attention_blocks import find_blocks
from captum_norm.models.stacks import Place, Role, Sizes
from captum_norm.models.wrappers import class_of
from captum_norm.results.stacks import STACKS

Result = TypeVar("Result")
# Maps with fewer entries than this always fit.
LARGE_MAP = 2**20
Blocks = Mapping[nn.Module, Block]
"""The attention blocks of a model, by the modules that attend."""


class MeterOptions(TypedDict, total=False):
    """Options of how norms are computed.

    Attributes:
        tokenizer: turns a text, or a list of texts, given as inputs into the model's arguments; not needed if the model
            is a pipeline or a SentenceTransformer, which have one.
        accumulate: the least precise dtype to compute in, by default float32; float64 for methods other than norms if
            the heads' vectors nearly cancel.
        memory_budget: bytes that intermediate results may take at a time on each device, by default a quarter of the
            free memory; results come on top.
        baseline: start of the integrated-gradients paths through activations: ``"zero"`` (default), where biases get a
            share like every vector, or ``"bias"``, the pre-activation without any vector, where the vectors share what
            they add to it.
        differentiable: run under ``torch.enable_grad``, so that gradients flow through the results; by default False.
    """

    tokenizer: Any
    accumulate: torch.dtype
    memory_budget: int | None
    baseline: Baseline
    differentiable: bool


class Session:
    """A model, understood once and run as often as asked.

    Args:
        model: a model of Hugging Face, one built with torch.nn's attention, or a translation model of fairseq, in any
            mode and dtype, on any device; a pipeline of transformers; or a SentenceTransformer. Left as it is.
        tokenizer, accumulate, memory_budget, baseline, differentiable: see
            :class:`captum_norm.forward.session.MeterOptions`.

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

    def shown(self, method: object) -> str:
        """Return the ``repr`` of a method: its class, the model, its options, and those of the session that differ."""
        parameters, defaults = signature(type(method)).parameters, signature(Session).parameters
        chosen = {name: vars(method).get(name) for name in parameters if name != "model"}
        shown = {name: value for name, value in chosen.items() if value is not None}
        own: dict[str, Any] = {"accumulate": self.options.accumulate, "memory_budget": self.options.budget.limit}
        own |= {"baseline": self.options.baseline, "differentiable": self.differentiable}
        shown |= {name: value for name, value in own.items() if value != defaults[name].default}
        options = [f"{name}={value!r}" for name, value in shown.items()]
        return f"{type(method).__name__}({', '.join([self.name, *options])})"

    def bind(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        stacks: Collection[Role] | None = None,
        *,
        chained: bool = True,
    ) -> ModelCall:
        """Bind inputs to the model; at its first call, compare a model that must be intercepted with itself.

        Args:
            inputs: see :meth:`captum_norm.NormMeter.measure`.
            additional_forward_args: the model's further positional arguments (attention mask first).
            stacks: the stacks to explain of a model with towers; if None, those that read the tokens.
            chained: whether the maps of layers may be chained, which needs to be seen at the first call.

        Raises:
            InvalidInputError: the inputs do not fit the model.
            UnsupportedModelError: the model computes something else than with attention weights.
            NonFiniteError: its weights contain NaN or infinity.
        """
        facts = understand(self.model)
        if stacks is not None and facts.has_towers:
            facts = understand(self.model, frozenset(stacks))
        call = bind_inputs(facts, inputs, additional_forward_args, self.tokenizer)
        if facts.excerpt.sizes is None and call.positions.several and (chained or facts.intercepted):
            self.seen(call)
        if facts is not self._facts:
            self._facts, self._blocks = facts, None
        return call

    def roles(self, stacks: object) -> list[Role] | None:
        """Check the names of the stacks to explain; None stays None."""
        return None if stacks is None else as_stacks(understand(self.model), stacks)

    def seen(self, call: ModelCall) -> Excerpt:
        """What a forward pass over the first positions of the model's first call shows; it raises as :meth:`bind`."""
        known = call.facts.excerpt
        if known.sizes is None:
            try:
                with norms_taken_once(self.model):
                    known = seen(call)
            except CaptumNormError as error:
                self._name_reason(error)
                raise
        return known

    def refuse_mixing(self, call: ModelCall) -> None:
        """Refuse to chain the maps of layers if they mix positions otherwise, over these inputs' length, too."""
        known = call.facts.excerpt
        if max(call.positions.length or 0, call.decoder.length or 0) > known.longest:
            see_at_length(call)
        if known.mixing is not None:
            refuse_mixing(self.model)

    def sizes(self, call: ModelCall) -> Sizes:
        """Sizes of the model's stacks, seen on an excerpt.

        Raises:
            UnsupportedModelError: if no attention was seen.
        """
        sizes = self.seen(call).sizes
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
        self._refuse_autocast()
        known = self._blocks
        if known is None or (feed_forward and not all(block.searched for block in known.values())):
            try:
                known = on_excerpt(call, lambda excerpt: find_blocks(excerpt, feed_forward=feed_forward))
            except UnsupportedModelError:
                refuse_non_finite_weights(self.model)
                raise
            self._blocks = known
        return known

    def explain(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do some work with the model's blocks; if known blocks do not hold any more, find them anew and repeat.

        Weights written through ``.data`` and modules that were exchanged leave no trace.
        """
        known = self._blocks is not None
        kept = nullcontext() if known else norms_taken_once(self.model)
        with torch.set_grad_enabled(self.differentiable):
            try:
                with kept:
                    return work(*arguments)
            except CaptumNormError as error:
                if not known or not isinstance(error, IncompleteDecompositionError | UnsupportedModelError):
                    self._name_reason(error)
                    raise
            self._blocks = None
            return self.explain(work, *arguments)

    def record(
        self, call: ModelCall, request: Request, reduce: Callable[[Layer], Result], *, passes: int = 1
    ) -> Recording[Result]:
        """Run the model once and reduce the layers requested, each as soon as its tensors exist.

        Args:
            call: of the model.
            request: which layers, and which of their tensors.
            reduce: makes a layer's result.
            passes: how often ``reduce`` treats each query, for the progress bar.

        Returns:
            for each stack requested, its layers in the order of the request.

        Raises:
            NotEnoughMemoryError: the maps requested take more memory than is free.
            UnsupportedModelError: a stack that was requested was not seen.
            CaptumNormError: a check of the layers fails.
        """
        self.expect_room(call, request)
        blocks = self.blocks(call, feed_forward=request.feed_forward) if request.blocks else None
        if call.facts.excerpt.modules is None and call.positions.several:
            self.seen(call)
        chosen, stacks = dict[Role, list[int]](), request.stacks
        if request.layers is not None:
            chosen = {role: layer_indices(request.layers, size.layers) for role, size in self.sizes(call).items()}

        def is_chosen(place: Place) -> bool:
            some = request.layers is None or place.index in chosen.get(place.role, ())
            return some and (stacks is None or place.role in stacks)

        with ExitStack() as shown:
            advance: Callable[[int], object] = no_bar
            if passes and DISPLAY.get() is not None:
                total = passes * total_queries(call, self.sizes(call), is_chosen)
                advance = shown.enter_context(bar(self.name, total, "queries")).update
            which = None if request.layers is None and stacks is None else is_chosen
            layers, causal = record(
                call, reduce, self.options, blocks, chosen=which, feed_forward=request.feed_forward, advance=advance
            )
        check_seen(call, layers, request)
        if request.layers is not None:
            by_number = {role: dict(seen) for role, seen in layers.items()}
            layers = {role: [(number, seen[number]) for number in chosen[role]] for role, seen in by_number.items()}
        return layers, causal

    def expect_room(self, call: ModelCall, request: Request) -> None:
        """Refuse maps that will not fit in memory, by a NotEnoughMemoryError."""
        if may_be_large(call):
            expect_room(call, request, self.sizes(call), self.options.accumulate)

    def _name_reason(self, error: CaptumNormError) -> None:
        """Refuse the model for the reason behind an error: NaN in a weight, or what is known of its architecture."""
        if isinstance(error, IncompleteDecompositionError | UnsupportedModelError):
            reason = refusal_of(self.model)
            if reason is not None:
                raise UnsupportedModelError(f"{self.name} is not supported: {reason}") from error
        if isinstance(error, NonFiniteError | UnsupportedScopeError):
            refuse_non_finite_weights(self.model)
        hooks = [] if isinstance(error, InvalidInputError | NonFiniteError) else hooks_of_users(self.model)
        if hooks:
            raise type(error)(
                f"{error}; hooks run on {', '.join(hooks)}: what they change may be no part of the sum, so remove "
                "these hooks, or write the change into weights or biases"
            ) from error

    def _refuse_autocast(self) -> None:
        """Refuse automatic mixed precision, which would compute norms in half precision, too."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        enabled = list(filter(torch.is_autocast_enabled, kinds))
        if enabled and any(parameter.device.type in enabled for parameter in self.model.parameters()):
            raise InvalidInputError(
                "torch.autocast is on, in which norms would be computed in half precision; convert the model instead "
                "(model.bfloat16()), whose vectors are added up in float32"
            )


def may_be_large(call: ModelCall) -> bool:
    """Whether the maps of a call may not fit."""
    longest = max(call.positions.length or 0, call.decoder.length or 0) + call.prefix.virtual + call.prefix.past
    return call.batch * longest**2 >= LARGE_MAP


def check_seen(call: ModelCall, seen: Collection[Role], request: Request) -> None:
    """Refuse a call in which no attention of a requested stack was seen."""
    if call.facts.towers:
        names = request.stacks or ("self",)
    elif call.facts.decoder is None:
        return
    else:
        # A decoder alone is given an encoder's output and has no encoder.
        has_encoder = next(call.facts.reader.module.parameters(), None) is not None
        names = [name for name in STACKS if (name != "encoder" or has_encoder) and request.has_stack(name)]
    missing = [name for name in names if name not in seen]
    if missing:
        missing = ["text" if name == "self" else name for name in missing]
        others = [name for name in STACKS if name in seen]
        hint = "pass its inputs, too" if call.facts.towers else f"choose others, stacks={others}"
        raise UnsupportedModelError(
            f"no attention of the stack {' or '.join(missing)} was seen in {type(call.model).__name__}; {hint}"
        )


def refuse_unknown(
    method: type, options: Mapping[str, Any], known: Collection[str] = tuple(MeterOptions.__annotations__)
) -> None:
    """Raise for unknown options in the name of the class that was called."""
    for name in options:
        if name not in known:
            hint = did_you_mean(name, {*signature(method).parameters, *known})
            raise TypeError(f"{method.__name__}() got an unexpected keyword argument {name!r}{hint}")


def refuse_non_finite_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinity in a weight."""
    for path, module in model.named_modules():
        with loaded(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if not parameter.detach().isfinite().all():
                    raise NonFiniteError(f'the weight "{name}" of {type(model).__name__} contains NaN or infinity')
