"""Reads norms, activations and affine maps with a bias from single modules."""

import torch
from torch import Tensor, nn

from captum_norm.functional import Elementwise
from captum_norm.models.feed_forward import ExpertsReader
from captum_norm.models.measured_projections import read_projection
from captum_norm.models.projections import NormReader, Projection, read_norm, reproduces, tensor_of

# How many positions a reading is checked on.
ROWS = 8


Step = NormReader | Projection | Elementwise | ExpertsReader


def read_step(module: nn.Module, inputs: Tensor, output: Tensor) -> NormReader | Projection | Elementwise | None:
    """Return what a module computes from an input (..., C) to an output (..., D).

    A normalisation, an affine map with a bias, or an activation (a function, without the module's hooks); None for
    anything else, such as a linear map without bias or the identity.
    """
    inputs, output = inputs.detach().reshape(-1, inputs.shape[-1]), output.detach().reshape(-1, output.shape[-1])
    composite = any(True for _ in module.children())
    if (composite or tensor_of(module, "bias") is not None) and len(inputs) == len(output):
        projection = read_projection(module, inputs[:ROWS], output[:ROWS])
        if projection is not None:
            return projection
    if inputs.shape != output.shape or torch.equal(inputs, output):
        return None
    if all(parameter.numel() == 1 for parameter in module.parameters()):

        def activation(values: Tensor) -> Tensor:
            computed: Tensor = module.forward(values)
            return computed

        if _is_elementwise(activation, inputs, output):
            return activation
    return read_norm(module, inputs[:ROWS], output[:ROWS])


def _is_elementwise(function: Elementwise, inputs: Tensor, output: Tensor) -> bool:
    """Whether every second entry stays the same when the others become zero, and these all get one value."""
    kept = (torch.arange(inputs.numel(), device=inputs.device) % 2 == 0).reshape(inputs.shape)
    changed = function(inputs.where(kept, 0))
    between = changed[~kept]
    same = between.numel() == 0 or bool((between == between[0]).all())
    return same and reproduces(changed.where(kept, 0), output.where(kept, 0), output)
