"""A factor behind a normalisation, or alone."""

import pytest
import torch

from captum_norm.functional import Normalization, apply_linear, inverse_scale, normalize, scaled


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [torch.tensor(0.3, dtype=torch.float64), torch.linspace(-1, 2, 6).double()])
def test_scaled_is_the_factor_times_the_normalisation(seed: int, factor: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole, gain, bias = (torch.randn(*shape, 6, generator=generator).double() for shape in ((2, 5), (), ()))
    for norm in (Normalization(True, gain, bias, 1e-5), Normalization(False, gain, None, 1e-6)):
        torch.testing.assert_close(normalize(scaled(norm, factor), whole), factor * normalize(norm, whole))
    bare = Normalization(False, None, None, 1e-6)
    torch.testing.assert_close(normalize(scaled(bare, factor), whole), factor * normalize(bare, whole))
    alone = scaled(None, factor)
    assert torch.equal(normalize(alone, whole), factor * whole)
    assert torch.equal(apply_linear(alone, whole), factor * whole)
    assert torch.equal(inverse_scale(alone, whole), torch.ones(2, 5, 1).double())
