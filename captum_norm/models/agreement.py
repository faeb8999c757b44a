"""Whether a model computes while it is explained what it computes by itself."""

from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.inputs import ModelCall
from captum_norm.models.library import EagerAttention
from captum_norm.models.seams import library_of
from captum_norm.models.tracing import evaluating, first_tensor


class PlainAttention:
    """Attends as the model's eager attention does.

    Attributes:
        queries: how many queries each module had that called it.
    """

    def __init__(self) -> None:
        self.queries: dict[nn.Module, int] = {}

    def attend(
        self,
        eager: EagerAttention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        cross: bool,  # noqa: ARG002
        **options: Any,
    ) -> Tensor:
        """Stands in for the model's attention function."""
        self.queries[module] = query.shape[2]
        return eager(module, query, key, value, mask, **options)[0]


def expect_same_output(call: ModelCall) -> dict[nn.Module, int]:
    """Run a model by itself and as it runs while it is explained.

    Args:
        call: the model with few and short examples.

    Returns:
        the modules that called attention, and how many queries they had.

    Raises:
        UnsupportedModelError: if the outputs differ by more than rounding.
    """
    attention = PlainAttention()
    with torch.no_grad(), evaluating(call.model):
        with library_of(call.model).attention_through(call.model, attention.attend):
            explained = _output(call)
        own = _output(call)
    if own is not None and explained is not None:
        _compare(call, own, explained)
    return attention.queries


def _output(call: ModelCall) -> Tensor | None:
    """The first tensor that the model returns, with the random numbers that a model may draw always the same."""
    devices = {parameter.device for parameter in call.model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        output = first_tensor(call.run())
    return None if output is None else output.clone()


def _compare(call: ModelCall, own: Tensor, explained: Tensor) -> None:
    name, precision = type(call.model).__name__, _precision(call.model, own)
    # Half of the digits: layers add up what attention functions round in another way.
    accepted = torch.finfo(precision).eps ** 0.5
    if own.shape != explained.shape:
        raise UnsupportedModelError(
            f"{name} returns a tensor of shape {tuple(own.shape)}, and of {tuple(explained.shape)} while its attention "
            "weights are looked at; expected the same"
        )
    error = _relative_error(own, explained, call, half=precision.itemsize < torch.float32.itemsize)
    if error > accepted:
        raise UnsupportedModelError(
            f"{name} computes something else by itself than with attention weights that can be explained: relative "
            f"difference of the outputs {error:.1e}, accepted {accepted:.0e} for {precision}; if it is these that you "
            f"want explained, run it so, too{library_of(call.model).with_weights}"
        )


def _precision(model: nn.Module, output: Tensor) -> torch.dtype:
    """The least precise dtype that a model computes in; many files take softmax in float32 whatever their own."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.is_autocast_enabled(output.device.type):
        dtypes.add(torch.get_autocast_dtype(output.device.type))
    return max({torch.float32, output.dtype, *dtypes}, key=lambda dtype: torch.finfo(dtype).eps)


def _relative_error(own: Tensor, explained: Tensor, call: ModelCall, *, half: bool) -> float:
    """That of the worst position that is no padding; 0 where something is not finite, of which others tell.

    In half precision that of the median: where rounding makes a router choose other experts, a position differs widely.
    """
    own, explained = (_real(output, call).flatten(0, -2).double() for output in (own, explained))
    error = (own - explained).norm(dim=-1) / own.norm(dim=-1).clamp(min=torch.finfo(own.dtype).tiny)
    if not error.isfinite().all():
        return 0.0
    return float(error.median() if half else error.max())


def _real(output: Tensor, call: ModelCall) -> Tensor:
    """The output at real positions, if it has some for each."""
    positions = call.decoder if call.decoder.length else call.positions
    if positions.real is not None:
        for real in (positions.real, positions.real.T):
            if output.shape[:2] == real.shape and output.dim() > 2:
                return output[real.to(output.device)].unsqueeze(0)
    return output
