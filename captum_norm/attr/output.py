"""Decomposes values of a model's output: the base class of the methods that do."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.frozen.network import HookedModules
from captum_norm.checks import check_bool
from captum_norm.errors import InvalidInputError
from captum_norm.forward.checks import delta_for
from captum_norm.forward.gradients import gradients_on
from captum_norm.forward.request import Request
from captum_norm.forward.session import MeterOptions
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import OutputValues, Position, Readout, Target


class Decomposition(NamedTuple):
    """Output values, decomposed: one of each example, or P, whose axis is then there.

    Attributes:
        scores: each token's contribution, (B[, P], S), 0 at padding, after those of virtual tokens, if any; for an
            encoder–decoder model a :class:`captum_norm.SourceAndPrefix` of those of the source, (B[, P], S), and the
            target prefix, (B[, P], T).
        bias: the biases' contribution, (B[, P]); 0 if they are shared among the tokens.
        number: the value, (B[, P]).
        convergence_delta: ``|Σ scores + bias − number| / (Σ |scores| + |bias|)``, or the frozen network's deviation
            from the model if larger, (B[, P]). For a difference of two outputs, the error is relative to their sizes if
            these are larger, since they were rounded.
    """

    scores: Any
    bias: Tensor
    number: Tensor
    convergence_delta: Tensor


class OutputAttribution(AttentionMapAttribution):
    """Base class of methods that decompose values of a model's output.

    Args:
        model: a supported model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        options: see :class:`captum_norm.MeterOptions`.
    """

    target: ClassVar[Literal["never", "optional", "always"]] = "always"
    text_alone = True
    any_rows = False

    def __init__(self, model: Explainable, *, readout: Readout | None = None, **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, "mean", **options)
        self._readout = readout
        self._modules: HookedModules | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What is known about a model does not leave the process: see Session.
        return vars(self) | {"_modules": None}

    def decompose(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        together: bool = False,
    ) -> Decomposition:
        """Decompose an output value of each example, or P values of each, in one forward pass.

        Args:
            inputs: as for :meth:`~captum_norm.NormAttribution.maps`.
            target: which value: a class or token for all, one for each example, (B,), or one for each value, (B, P); or
                a :class:`captum_norm.Difference` of such. None: the one that the model predicts there.
            additional_forward_args: as for :meth:`~captum_norm.NormAttribution.maps`.
            position: where values are read, if there are outputs at each position: as for
                :meth:`~captum_norm.NormAttribution.attribute`, or several positions of each example, (B, P), which may
                repeat.
            together: explain the sum of an example's values, such as the logits of a whole answer.

        Returns:
            the contributions. If targets or positions have an axis P, so has every tensor, behind that of the examples,
            unless the values are explained together.

        Raises:
            InvalidInputError: for a target or position outside the output.
            IncompleteDecompositionError: if the contributions do not add up to the value, as when the model computes
                something that is neither linear nor a norm, an activation or a gated pair.
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.

        Example:
            >>> import torch
            >>> from captum_norm import AttnLRP
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
            >>> ids = torch.tensor([[7, 9, 3, 8, 5]])  # a prompt and its answer, 3 8 5
            >>> AttnLRP(model).decompose(ids, ids[:, 2:], position=[[1, 2, 3]]).scores.shape
            torch.Size([1, 3, 5])
            >>> AttnLRP(model).decompose(ids, ids[:, 2:], position=[[1, 2, 3]], together=True).scores.shape
            torch.Size([1, 5])
        """
        request = Request(target=target, position=position)
        call, request = self.call_of(inputs, additional_forward_args, request)
        return self.decomposition(call, self._values(call, request), together=check_bool("together", together))

    def compute_convergence_delta(
        self,
        attributions: Tensor | tuple[Tensor, ...],
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        target: Target = None,
        position: Position = None,
    ) -> Tensor:
        """Compute the completeness error of the value that ``target`` names; of hidden states, the largest over layers.

        Args:
            attributions: what :meth:`~captum_norm.NormAttribution.attribute` returned for these inputs, (B, S).
            inputs: as for :meth:`~captum_norm.NormAttribution.maps`.
            additional_forward_args: as for :meth:`~captum_norm.NormAttribution.maps`.
            target: as for :meth:`~captum_norm.NormAttribution.attribute`.
            position: as for :meth:`~captum_norm.NormAttribution.attribute`.

        Returns:
            (B,), relative: see :class:`captum_norm.Decomposition`.

        Raises:
            InvalidInputError: if the attributions are of other inputs.
        """
        if not self._explains_output(target):
            return super().compute_convergence_delta(attributions, inputs, additional_forward_args)
        parts = self.decompose(inputs, target, additional_forward_args, position=position)
        return delta_for(attributions, parts.convergence_delta)

    def _explains_output(self, target: Target) -> bool:  # noqa: ARG002 - a method with maps looks at it
        """Whether a value of the output is explained rather than hidden states."""
        return True

    @abstractmethod
    def decomposition(self, call: ModelCall, values: OutputValues, *, together: bool = False) -> Decomposition:
        """Decompose the values of a call's output, or the sum of each example's."""

    def _values(self, call: ModelCall, request: Request) -> OutputValues:
        # Indices made in inference mode cannot be saved for a gradient.
        with gradients_on():
            return OutputValues.of(call, request.target, request.position, self._readout)

    def _value(self, call: ModelCall, request: Request) -> OutputValues:
        """Return the only value of each example."""
        values = self._values(call, request)
        if values.several:
            raise InvalidInputError(
                f"got {values.count} values of each example; attribute and maps explain one: pass them to decompose"
            )
        return values

    def _hooked(self, blocks: Mapping[nn.Module, Block]) -> HookedModules:
        """Find the modules to hook in a model, once."""
        if self._modules is None or self._modules.blocks is not blocks:
            self._modules = HookedModules(self.model, blocks)
        return self._modules
