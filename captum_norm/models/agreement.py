"""Compares what a model computes while it is explained with what it computes by itself."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.hooks import Received, evaluating, first_argument, first_tensor, tensors_in, with_argument
from captum_norm.models.inputs import ModelCall
from captum_norm.models.stacks import Stacks
from captum_norm.models.threads import here


@contextmanager
def attending_plainly(call: ModelCall) -> Iterator[Stacks]:
    """While open, the model attends as it does while it is explained; gives the stacks that are seen."""
    stacks = call.stacks()
    with call.attention_through(lambda attention: stacks.attend(attention)[0]):
        yield stacks


def expect_same_output(call: ModelCall) -> Stacks:
    """Run a model by itself and as it runs while it is explained.

    Args:
        call: the model with few and short examples.

    Returns:
        the stacks of layers that were seen.

    Raises:
        UnsupportedModelError: if the outputs differ by more than rounding.
    """
    with torch.no_grad(), evaluating(call.model):
        with attending_plainly(call) as stacks:
            explained = _outputs(call)
        own = _outputs(call)
        # While it is explained a model may return no attention weights, which come behind what it is for.
        compared = list(zip(own, explained, strict=False))[: None if len(own) == len(explained) else 1]
        precision = max((_precision(call.model, first) for first, _ in compared), key=_eps, default=torch.float32)
        # Half of the digits: layers add up what attention functions round in another way.
        accepted = _eps(precision) ** 0.5
        error = max((_error(first, second, call) for first, second in compared), default=0.0)
        if error > accepted and _eps(precision) > _eps(torch.float32):
            # A router may choose otherwise, and a head may cancel all that is not rounding.
            error = max(_errors_of_modules(call, stacks.queries), default=error)
    if error > accepted:
        raise UnsupportedModelError(
            f"{type(call.model).__name__} computes something else by itself than with attention weights that can be "
            f"explained: relative difference {error:.1e}, accepted {accepted:.0e} for {precision}; if it is these that "
            f"you want explained, run it so, too{call.library.with_weights}"
        )
    return stacks


def _outputs(call: ModelCall) -> list[Tensor]:
    """The numbers that the model returns."""
    returned = tensors_in(_run(call))
    return [torch.atleast_2d(tensor.clone()) for tensor in returned if tensor.is_floating_point() and tensor.numel()]


def _run(call: ModelCall) -> Any:
    """What the model returns, with the random numbers that a model may draw always the same."""
    devices = {parameter.device for parameter in call.model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        return call.run()


def _errors_of_modules(call: ModelCall, modules: Iterable[nn.Module]) -> Iterator[float]:
    """How far what each module of attention gives is off while the model is explained, for the same input."""
    given: list[Tensor] = []
    results: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        stream, result = first_argument(args, kwargs), first_tensor(output)
        if stream is not None and result is not None:
            given.append(stream.clone())
            results.append(result.clone())

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Received | None:
        stream = first_argument(args, kwargs)
        return with_argument(args, kwargs, stream, given.pop(0)) if stream is not None and given else None

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(here(note), with_kwargs=True).remove)
        _run(call)
        own, results = results, []
        for module in modules:
            stack.callback(module.register_forward_pre_hook(here(put), with_kwargs=True).remove)
        with attending_plainly(call):
            _run(call)
    if len(own) != len(results):
        yield math.inf
    for first, second in zip(own, results, strict=False):
        yield _error(first, second, call)


def _precision(model: nn.Module, output: Tensor) -> torch.dtype:
    """The least precise dtype that a model computes in; many files take softmax in float32 whatever their own."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.is_autocast_enabled(output.device.type):
        dtypes.add(torch.get_autocast_dtype(output.device.type))
    return max({torch.float32, output.dtype, *dtypes}, key=_eps)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _error(own: Tensor, explained: Tensor, call: ModelCall) -> float:
    """The relative error of the worst position that is no padding and is finite in both; of others, others tell."""
    if own.shape != explained.shape:
        return math.inf
    own, explained = (_real(output, call).flatten(0, -2).double() for output in (own, explained))
    error = (own - explained).norm(dim=-1) / own.norm(dim=-1).clamp(min=torch.finfo(own.dtype).tiny)
    finite = error[error.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def _real(output: Tensor, call: ModelCall) -> Tensor:
    """The output at real positions, if it has some for each."""
    for positions in (call.decoder, call.positions):
        if positions.real is not None:
            for real in (positions.real, positions.real.T):
                if output.shape[:2] == real.shape and output.dim() > 2:
                    return output[real.to(output.device)].unsqueeze(0)
    return output
