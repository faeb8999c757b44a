"""Declares where the parts of a layer are; declarations are checked against what the layer computes."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints

from torch import nn

from captum_norm.checks import quoted, quoted_name
from captum_norm.errors import InvalidInputError
from captum_norm.text.lines import read_text

Style = Literal["post-norm", "pre-norm", "parallel", "sandwich", "norm-on-output"]
Scope = Literal["attn", "attn_res", "attn_res_ln", "atb", "atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln"]
FEED_FORWARD_SCOPES: frozenset[Scope] = frozenset(("atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln"))


class Stage(NamedTuple):
    """A map of a layer and the component just before it.

    Attributes:
        component: ``ATTN``, ``RES``, ``LN``, ``FF``, or ``LN, RES`` if a branch is normalised before it is added.
        scope: the map's scope.
    """

    component: str
    scope: Scope


ModuleOrName = TypeVar("ModuleOrName", str, nn.Module)


@dataclass(frozen=True)
class Site(Generic[ModuleOrName]):
    """A tensor that a module receives or returns.

    Attributes:
        module: the module; in a layout its name inside the layer, "" for the layer itself.
        end: its first input tensor or its first output tensor.
    """

    module: ModuleOrName
    end: Literal["input", "output"]

    @staticmethod
    def parse(text: str) -> "Site[str]":
        """Return the site ``"NAME.input"`` or ``"NAME.output"``; those of the layer are ``"input"`` and ``"output"``.

        >>> Site.parse("post_attention_layernorm.input")
        Site(module='post_attention_layernorm', end='input')
        """
        module, _, end = text.rpartition(".")
        if end == "input":
            return Site(module, "input")
        if end == "output":
            return Site(module, "output")
        raise InvalidInputError(f"got the site {quoted(text)}; expected NAME.input, NAME.output, input or output")

    def inside(self: "Site[str]", layer: nn.Module) -> "Site[nn.Module]":
        """Return the site of the module that has this name inside a layer."""
        return Site(layer.get_submodule(self.module), self.end)

    def __str__(self) -> str:
        return f"{self.module}.{self.end}".removeprefix(".")


@dataclass(frozen=True)
class Layout:
    """The parts of an attention block in one kind of layer; all names are relative to the layer's module.

    The parts must satisfy these equations, which are checked on the layer's own tensors::

        projected = projection(Σ_j Σ_h α_hj v_hj)
        branch    = branch_factor ⊙ branch_norm(projected)   (parts that are None are left out)
        total     = residual_factor ⊙ residual + branch      (if minus is given: total - minus)
        output    = final_norm(total)                        (final_norm=None: the block ends at total)

    Attributes:
        attention: the module that calls the attention function.
        projection: the output projection.
        residual: the residual stream that the attention output is added to.
        total: the sum of both.
        minus: a further summand in ``total``: the feed-forward output of a parallel layer.
        branch_norm: the norm on the attention output before the sum (sandwich, norm-on-output).
        final_norm: the norm on the sum, if the layer continues with its output (post-norm).
        normed_input: whether attention reads the normalised residual stream rather than the stream itself.
        branch_factor: the name, inside the layer, of the number or vector (D,) that multiplies the attention output
            before the sum: a residual multiplier (Granite), a layer scale (BEiT, DINOv2).
        residual_factor: the name of the number or vector that multiplies the residual stream in the sum.

    Example:
        A LLaMA layer (in practice its structure is found automatically):

        >>> llama = Layout(
        ...     attention="self_attn", projection="self_attn.o_proj", residual=Site.parse("input"),
        ...     total=Site.parse("post_attention_layernorm.input"), normed_input=True)
        >>> llama.style, llama.scopes
        ('pre-norm', ('attn', 'attn_res', 'atb'))
    """

    attention: str
    projection: str
    residual: Site[str]
    total: Site[str]
    minus: Site[str] | None = None
    branch_norm: str | None = None
    final_norm: str | None = None
    normed_input: bool = False
    branch_factor: str | None = None
    residual_factor: str | None = None

    @property
    def end(self) -> Site[str]:
        """The site of the stream that the layer continues with; in a parallel layer, the stream that it began with."""
        if self.minus is not None:
            return self.residual
        return self.total if self.final_norm is None else Site(self.final_norm, "output")

    @cached_property
    def style(self) -> Style:
        """The name of the arrangement."""
        if self.final_norm is not None:
            return "post-norm"
        if self.branch_norm is not None:
            return "sandwich" if self.normed_input else "norm-on-output"
        return "pre-norm" if self.minus is None else "parallel"

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes of this arrangement.

        ``attn_res_ln`` exists if a norm follows the residual sum (post-norm); it then is the whole attention block. If
        a norm stands between attention and the sum, the bare attention output is never added to the stream: there is no
        ``attn_res``, only ``atb`` (norm and sum).
        """
        if self.final_norm is not None:
            return ("attn", "attn_res", "attn_res_ln", "atb") if self.branch_norm is None else ("attn", "atb")
        return ("attn", "attn_res", "atb") if self.branch_norm is None else ("attn", "atb")


@dataclass(frozen=True)
class FeedForwardLayout:
    """The parts of a feed-forward block in one kind of layer.

    All names are relative to the module that holds it and attention. The parts must satisfy these equations, which are
    checked on the layer's own tensors. x is the output of the attention block; in a parallel layer, the residual stream
    before it::

        read    = norm(x)                                  (norm=None: read = x)
        hidden  = g(inner(read))                           (one inner map)
        hidden  = g(gate(read)) * up(read)                 (two inner maps, or one whose output is cut in two)
        written = outer(hidden)
        branch  = branch_factor ⊙ branch_norm(written)     (parts that are None are left out)
        total   = residual_factor ⊙ x + branch
        output  = final_norm(total)                        (final_norm=None: output = total)

    Attributes:
        inner: the map into the neurons; of a gated network, both maps in either order.
        outer: the map out of the neurons.
        total: the sum with the residual stream.
        activation: the module that computes g; None if a function does.
        norm: the norm before the inner maps.
        branch_norm: the norm on the output before the sum.
        final_norm: the norm on the sum.
        branch_factor: the name, inside the layer, of the number or vector (D,) that multiplies the output before the
            sum: a residual multiplier, a layer scale.
        residual_factor: the name of the number or vector that multiplies the residual stream in the sum.

    Example:
        A LLaMA layer (in practice its structure is found automatically):

        >>> FeedForwardLayout(
        ...     inner=("mlp.gate_proj", "mlp.up_proj"), outer="mlp.down_proj", total=Site.parse("output"),
        ...     activation="mlp.act_fn", norm="post_attention_layernorm").outer
        'mlp.down_proj'
    """

    inner: tuple[str, ...]
    outer: str
    total: Site[str]
    activation: str | None = None
    norm: str | None = None
    branch_norm: str | None = None
    final_norm: str | None = None
    branch_factor: str | None = None
    residual_factor: str | None = None


_layouts: dict[str, Layout] = {}
_feed_forwards: dict[str, FeedForwardLayout] = {}
"""The layouts declared so far, by the name of the layer's class."""

Described = TypeVar("Described", Layout, FeedForwardLayout)

_FEED_FORWARD = "feed_forward"
"""The key of the table, inside that of a class in a file, that describes its feed-forward block."""


def register_layout(layer_class: str, layout: Layout) -> None:
    """Declare where the parts of a layer are, for layers whose structure is not found automatically.

    Args:
        layer_class: the name of the layer's class, for example ``"MyDecoderLayer"``.
        layout: the parts. They are checked against the layer's tensors when a model with such layers is first used. A
            later declaration for the same class replaces an earlier one.

    Example:
        >>> register_layout("DocumentedLayer", Layout(
        ...     attention="attention", projection="attention.out", residual=Site.parse("input"),
        ...     total=Site.parse("norm.input"), final_norm="norm"))
        >>> registered_layouts()["DocumentedLayer"].style
        'post-norm'
    """
    _layouts[layer_class] = layout


def registered_layouts() -> Mapping[str, Layout]:
    """Return the layouts declared so far, by the name of the layer's class."""
    return MappingProxyType(_layouts)


def register_feed_forward(layer_class: str, layout: FeedForwardLayout) -> None:
    """Declare where the feed-forward parts of a layer are, for layers in which they are not found automatically.

    Args:
        layer_class: the name of the class of the module that holds attention and feed-forward network, for example
            ``"MyDecoderLayer"``.
        layout: the parts. They are checked against the layer's tensors when a scope that includes them is first used. A
            later declaration for the same class replaces an earlier one.

    Example:
        >>> register_feed_forward("DocumentedLayer", FeedForwardLayout(
        ...     inner=("up",), outer="down", total=Site.parse("norm.input"), final_norm="norm"))
        >>> registered_feed_forwards()["DocumentedLayer"].inner
        ('up',)
    """
    _feed_forwards[layer_class] = layout


def registered_feed_forwards() -> Mapping[str, FeedForwardLayout]:
    """Return the feed-forward layouts declared so far, by the name of the layer's class."""
    return MappingProxyType(_feed_forwards)


def register_layouts(path: str | Path) -> tuple[str, ...]:
    """Declare the layouts in a TOML file.

    The file has one table for each class of layers, whose keys are the fields of :class:`Layout`. The keys of a table
    ``feed_forward`` inside it are those of :class:`FeedForwardLayout`; that table is enough where attention is found
    automatically.

    Args:
        path: the file.

    Returns:
        The names of the classes.

    Raises:
        InvalidInputError: if the file cannot be read or declares anything else.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        ...     _ = file.write('''
        ... [FiledLayer]
        ... attention = "attention"
        ... projection = "attention.out"
        ... residual = "input"
        ... total = "norm.input"
        ... final_norm = "norm"
        ...
        ... [FiledLayer.feed_forward]
        ... inner = ["up"]
        ... outer = "down"
        ... total = "last_norm.input"
        ... final_norm = "last_norm"
        ... ''')
        ...     file.flush()
        ...     register_layouts(file.name)
        ('FiledLayer',)
    """
    try:
        tables = tomllib.loads(read_text(path))
    except (RecursionError, ValueError) as error:  # ValueError: also numbers of too many digits
        raise InvalidInputError(f"cannot read layouts from {path}: {error}") from error
    attention: dict[str, Layout] = {}
    feed_forward: dict[str, FeedForwardLayout] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidInputError(f"{path}: got {quoted_name(name)} outside a table; expected [CLASS] before it")
        behind = table.pop(_FEED_FORWARD, None)
        if behind is not None:
            feed_forward[name] = _described(
                FeedForwardLayout, f"[{quoted_name(name)}.{_FEED_FORWARD}] in {path}", behind
            )
        if table or behind is None:
            attention[name] = _described(Layout, f"[{quoted_name(name)}] in {path}", table)
    _layouts.update(attention)
    _feed_forwards.update(feed_forward)
    return tuple(tables)


def _described(kind: type[Described], place: str, table: Any) -> Described:
    if not isinstance(table, Mapping):
        raise InvalidInputError(f"got {quoted(table)} for {place}; expected a table")
    kinds = get_type_hints(kind)
    for key in table:
        if key not in kinds:
            raise InvalidInputError(f'got the key "{quoted_name(key)}" of {place}; expected some of {", ".join(kinds)}')
    missing = [part.name for part in fields(kind) if part.default is MISSING and part.name not in table]
    parts = {
        key: _part(f"{quoted_name(key)} = {quoted(value)} of {place}", kinds[key], value)
        for key, value in table.items()
    }
    if missing:
        raise InvalidInputError(f"{place} has no {' and no '.join(missing)}")
    return kind(**parts)


def _part(described: str, kind: Any, value: Any) -> Any:
    """Convert a value to the type of a layout's field."""
    texts = isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
    expected, fits = "a text", isinstance(value, str)
    if kind is bool:
        expected, fits = "true or false", isinstance(value, bool)
    elif kind == tuple[str, ...]:
        expected, fits = "a list of texts", texts
    if not fits:
        raise InvalidInputError(f"got {described}; expected {expected}")
    if kind not in (Site[str], Site[str] | None):
        return tuple(value) if texts else value
    try:
        return Site.parse(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}, which is not {described}") from error
