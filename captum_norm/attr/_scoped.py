"""What the methods have in common whose maps are the norms at one scope."""

from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from captum_norm.aggregation import add_half_identity, normalize_rows
from captum_norm.attr._assembly import Measurements
from captum_norm.attr._base import AttentionMapAttribution, MapOptions, attribution_maps
from captum_norm.attr.measure import MeterOptions
from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.maps import AttributionMaps
from captum_norm.models.inputs import Inputs
from captum_norm.models.layouts import Scope
from captum_norm.models.stacks import StackName


class ScopedNorms(AttentionMapAttribution):
    """A method whose maps are the norms at one scope."""

    scopes: ClassVar[tuple[Scope, ...]]

    def __init__(self, model: nn.Module, scope: Scope, aggregation: str, **options: Unpack[MeterOptions]) -> None:
        if str(scope) not in self.scopes:
            raise UnsupportedScopeError(
                f'got the scope "{scope}"; {type(self).__name__} has the scopes {", ".join(self.scopes)}'
            )
        super().__init__(model, aggregation, **options)
        self.scope = scope

    def _maps(self, inputs: Inputs, additional_forward_args: Any, options: MapOptions) -> AttributionMaps:
        if options.per_head and self.scope != "attn":
            raise InvalidInputError(f'got per_head=True for the scope "{self.scope}"; only "attn" splits into heads')
        layers, per_head, stacks, *_ = options
        measured = self._meter.measure(
            inputs, additional_forward_args, scopes=[self.scope], head_norms=per_head, layers=layers, stacks=stacks
        )

        def choose(_: StackName, stack: Measurements) -> tuple[Tensor, Tensor]:
            maps = stack.norms[self.scope] if stack.head_norms is None else stack.head_norms
            return maps, stack.mixing_ratio[self.scope]

        return attribution_maps(measured, choose)

    def has_convergence_delta(self) -> bool:
        """True: the vectors must add up to what the model computed."""
        return True

    def _aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        # A rollout multiplies the ways through the layers; without the residual connection half of them are missing.
        if self.scope == "attn" and self.aggregation == "rollout":
            # A product goes layer by layer, without a second copy of all maps.
            for layer in reversed(stack.split(1, dim=1)):
                rows = super()._aggregate(add_half_identity(normalize_rows(layer)), rows)
            return rows
        return super()._aggregate(stack, rows)
