"""What the methods have in common that explain one number of the model's output."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from captum_norm.attr._base import AttentionMapAttribution, MapOptions, Position
from captum_norm.attr._tolerance import finite_results, refuse_non_finite_weights
from captum_norm.errors import InvalidInputError, NonFiniteError
from captum_norm.maps import AttributionMaps
from captum_norm.models.inputs import Inputs
from captum_norm.models.outputs import Difference
from captum_norm.models.stacks import StackName


class TargetedAttribution(AttentionMapAttribution):
    """A method whose maps may depend on a number of the output."""

    def maps(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        layers: Sequence[int] | None = None,
        per_head: bool = False,
        stacks: Collection[StackName] | None = None,
        target: Any = None,
        position: Position = None,
    ) -> AttributionMaps:
        """The map of every layer.

        Args:
            inputs: as for every method: see :meth:`captum_norm.NormAttribution.maps`.
            additional_forward_args: the model's further positional arguments (attention mask first).
            layers: 0-based indices of the layers wanted, negative ones from the last; all if None.
            per_head: one map a head instead of one a layer.
            stacks: None; there is one stack.
            target: which output to explain: see :meth:`attribute`.
            position: at which position, where the model has outputs at each.

        Returns:
            the maps.

        Raises:
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
        """
        options = MapOptions(layers, per_head, stacks, target, position)
        return finite_results(self.model, self._maps_and_head(inputs, additional_forward_args, options))


def one_of_each(options: MapOptions, index: int, batch: int) -> MapOptions:
    """The options for one example of a batch."""

    def one(value: Any, what: str) -> Any:
        if isinstance(value, Difference):
            return Difference(one(value.target, what), one(value.other, what))
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        if len(value) not in (1, batch):
            raise InvalidInputError(f"got {len(value)} {what} for {batch} examples")
        return value[index % len(value)]

    return options._replace(target=one(options.target, "targets"), position=one(options.position, "positions"))


def refuse_non_finite(model: nn.Module, number: Tensor) -> None:
    """Refuse an output that is no number."""
    if not number.isfinite().all():
        refuse_non_finite_weights(model)
        raise NonFiniteError(f"the output of {type(model).__name__} contains NaN or infinity")
