"""Understands a model: reads every fact about it once, for as long as its modules, dtypes and devices stay the same.

The table ``refused.toml`` says why architectures are refused.
"""

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.attention import AttentionCall
from captum_norm.models.hooks import modules_of
from captum_norm.models.libraries.huggingface import HUGGING_FACE
from captum_norm.models.libraries.library import AttentionThrough, Library, forward_parameters
from captum_norm.models.libraries.torch_nn import FAIRSEQ, TORCH_NN
from captum_norm.models.offloading import note_sharded, processes_of
from captum_norm.models.stacks import TEXT_STACKS, Role, Sizes, stack_reader
from captum_norm.models.wrappers import config_of, is_peft, refuse_spread, unwrapped

LIBRARIES = (TORCH_NN, FAIRSEQ, HUGGING_FACE)
"""In order: a model belongs to the first library that fits; the last one fits all models."""
POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")
Table = Literal["refused", "without_feed_forward"]
Watched = frozenset[str]
"""The stacks to explain of a model with towers; empty for any other model."""


class Reader(NamedTuple):
    """What reads a sequence of inputs: a model, its encoder or its decoder."""

    module: nn.Module
    embeddings: nn.Module | None  # the module that embeds its token ids
    longest: int | None  # the largest number of positions that it has position embeddings for


@dataclass(eq=False)
class Excerpt:
    """What a forward pass over a few positions showed of a model in one state; it outlives :class:`Model`."""

    state: tuple[object, ...]
    mixing: str | None = None  # the first layer that mixes positions other than by attention, if there is one
    sizes: Sizes | None = None  # None before the forward pass
    # The attention modules of each stack, in the order of their calls; weak, since one of them may hold the model.
    modules: Mapping[Role, Sequence[ref[nn.Module]]] | None = None
    causal: bool | None = None  # whether the only stack looks back alone
    headless: bool = False  # whether its output has names, none of which is that of logits
    longest: int = 0  # the most positions over which no layer but ``mixing`` mixes them other than by attention


@dataclass(eq=False)
class Model:
    """The facts of a model in one state."""

    module: nn.Module
    state: tuple[object, ...]  # its modules, attention implementations, dtypes and devices
    library: Library
    parameters: Mapping[str, inspect.Parameter]  # of its forward function
    reader: Reader  # of the inputs: an encoder–decoder model's encoder
    decoder: Reader | None  # of the decoder's inputs; None for any other model
    towers: Mapping[str, nn.Module]  # the models inside it that read images or sounds beside tokens, by name
    has_towers: bool  # which a model made of them alone has, too
    watched: Watched
    takes_cache: bool  # whether it takes ``use_cache``, or hands it on to the model inside it that reads the tokens
    adapted: nn.Module | None  # the adapter of PEFT that may put virtual tokens before the inputs
    processes: Any  # that have its shards; None if it is in this one alone
    role_of: Callable[[AttentionCall], Role]
    attention_through: AttentionThrough
    intercepted: bool  # whether attention is intercepted in the model's own code, not observed where it is looked up
    excerpt: Excerpt
    inner: nn.Module  # inside all wrappers
    forward: object  # a forward function of its own instance

    @property
    def encoder(self) -> nn.Module | None:
        """The encoder of an encoder–decoder model; None for any other model."""
        return None if self.decoder is None else self.reader.module

    @property
    def with_weights(self) -> str:
        """How to make it compute its attention weights explicitly, for messages; empty if it is set to already."""
        implementation = getattr(config_of(self.module), "_attn_implementation", None)
        return "" if implementation == "eager" else f": {self.library.with_weights}" * bool(self.library.with_weights)


# Facts hold the model, so they live as long as somebody who uses them.
_models: WeakKeyDictionary[nn.Module, WeakValueDictionary[Watched, Model]] = WeakKeyDictionary()
_excerpts: WeakKeyDictionary[nn.Module, dict[Watched, Excerpt]] = WeakKeyDictionary()


def understand(module: nn.Module, watched: Watched = frozenset()) -> Model:
    """Return the facts of a model in its present state."""
    every, state = _models.setdefault(module, WeakValueDictionary()), _state(module)
    known = every.get(watched)
    if known is None or known.state != state or known.forward is not vars(known.inner).get("forward"):
        known = every[watched] = _read(module, state, watched)
    return known


def _read(module: nn.Module, state: tuple[object, ...], watched: Watched) -> Model:
    refuse_spread(module)
    note_sharded(module)
    library = library_of(module)
    towers, halves = library.towers(module), library.halves(module)
    text, others = (module, {}) if towers is None else towers
    excerpts = _excerpts.setdefault(module, {})
    excerpt = excerpts.get(watched)
    if excerpt is None or excerpt.state != state:
        # Whether layers mix positions is known of the state before until this one is verified.
        excerpt = excerpts[watched] = Excerpt(state, None if excerpt is None else excerpt.mixing)
    inner = unwrapped(module)
    parameters = inspect.signature(inner.forward).parameters
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return Model(
        module=module,
        state=state,
        library=library,
        parameters=parameters,
        reader=_reader(library, text if halves is None else halves[0]),
        decoder=None if halves is None else _reader(library, halves[1]),
        towers=others,
        has_towers=towers is not None,
        watched=(watched or frozenset(TEXT_STACKS)) if towers is not None else frozenset(),
        takes_cache="use_cache" in parameters or (takes_all and "use_cache" in forward_parameters(text)),
        adapted=next(filter(is_peft, module.modules()), None),
        processes=processes_of(module),
        role_of=stack_reader(None if halves is None else halves[0], others),
        attention_through=library.observer(module),
        intercepted=library.intercepts(module),
        excerpt=excerpt,
        inner=inner,
        forward=vars(inner).get("forward"),
    )


def _reader(library: Library, module: nn.Module) -> Reader:
    return Reader(module, library.embeddings(module), longest_sequence(module))


def _state(model: nn.Module) -> tuple[object, ...]:
    """Modules, attention implementations, dtypes, devices, autocast: what a forward pass must be seen again for."""
    modules, configurations, parameters = modules_of(model), dict[int, Any](), list[tuple[object, ...]]()
    for module in modules:
        attributes = vars(module)
        if attributes.get("config") is not None:
            configurations[id(attributes["config"])] = getattr(attributes["config"], "_attn_implementation", None)
        for parameter in attributes["_parameters"].values():
            if parameter is not None:
                parameters.append((parameter.dtype, parameter.device))
    kinds = list(zip(map(ref, modules), map(type, modules), strict=True))
    return kinds, list(configurations.values()), parameters, torch.is_autocast_enabled()


def refuse_mixing(module: nn.Module) -> None:
    """Refuse to aggregate attention maps over layers if a layer is known to mix positions otherwise."""
    for watched, excerpt in _excerpts.get(module, {}).items():
        if excerpt.mixing is not None and (not watched or "self" in watched):
            raise UnsupportedModelError(
                f"{type(module).__name__} mixes positions by more than attention weights, in {excerpt.mixing}: "
                "attention maps cannot be aggregated over its layers; explain single layers: attribute(layer=...), or "
                "maps() of a method that maps each layer on its own"
            )


def library_of(module: nn.Module) -> Library:
    """Return the library that a model is built with."""
    return next(library for library in LIBRARIES if library.fits(module))


def encoder_of(module: nn.Module) -> nn.Module | None:
    """Return the encoder of an encoder–decoder model; None for any other model, an encoder alone included."""
    halves = library_of(module).halves(module)
    return None if halves is None else halves[0]


def no_attention(module: nn.Module) -> str:
    """Return the message for a model in which no attention call was seen."""
    expected = ", or ".join(library.models for library in reversed(LIBRARIES))
    return f"no attention was seen in {type(module).__name__}; expected {expected}"


def longest_sequence(part: nn.Module) -> int | None:
    """Largest number of positions that a model, its encoder or its decoder has position embeddings for.

    They are found by name; None if there are none.
    """
    named = (child for module in modules_of(part) for child in module._modules.items())
    tables = (table for name, table in named if name in POSITION_TABLES and isinstance(table, nn.Embedding))
    # RoBERTa's positions start after the padding index, OPT's at an offset.
    counts = (
        table.num_embeddings
        - int(getattr(table, "offset", 0))
        - (0 if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
    )
    return min(counts, default=None)


@cache
def refusals(table: Table = "refused") -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table: of refused architectures, or of those without scopes through their networks."""
    text = resources.files("captum_norm.models").joinpath("refused.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)[table]  # type: ignore[no-any-return]


def refusal_of(model: nn.Module, table: Table = "refused") -> str | None:
    """Return why a model is refused, or the reason of another table; None if it is not in the table."""
    classes = {type(module).__name__ for module in model.modules()}
    for refusal in refusals(table):
        others = refusal.get("beside", refusal["modules"])
        if not classes.isdisjoint(refusal["modules"]) and not classes.isdisjoint(others):
            return str(refusal["reason"])
    return None
