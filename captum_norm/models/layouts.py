"""Declares where the parts of a layer are; declarations are checked against what the layer computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from torch import nn

from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError

Style = Literal["post-norm", "pre-norm", "parallel", "sandwich", "norm-on-output"]
Scope = Literal["attn", "attn_res", "attn_res_ln", "atb", "atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln"]
FEED_FORWARD_SCOPES: frozenset[Scope] = frozenset(("atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln"))

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
        if end not in ("input", "output"):
            raise InvalidInputError(f"got the site {quoted(text)}; expected NAME.input, NAME.output, input or output")
        return Site(module, "input" if end == "input" else "output")

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


_layouts: dict[str, Layout] = {}
"""The layouts declared so far, by the name of the layer's class."""


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
