"""Tests which methods differ from the best one by more than chance."""

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from captum_norm.lab.comparison.measures import Measure

LEVEL = 0.05
"""The probability of chance below which two methods differ."""

_EXACT = 12
_SAMPLES = 4096


def sign_flip_p(differences: Tensor) -> float:
    """Return the two-sided p-value of paired differences, (N,): how often flipped signs give a mean as far from 0.

    All 2^N flips are tried for up to 12 examples, else 4096 drawn ones with a fixed seed.

    Example:
        >>> sign_flip_p(torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 2.0]))
        0.03125
    """
    count = len(differences)
    if count <= _EXACT:
        signs = torch.tensor(list(product((1.0, -1.0), repeat=count)), dtype=torch.float64)
    else:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (_SAMPLES, count), generator=generator).double() * 2 - 1
        signs[0] = 1  # what was observed is one of them
    sums = (signs @ differences.double()).abs()
    return float((sums >= sums[0] - 1e-9 * differences.double().abs().sum()).double().mean())


def undefeated(values: Mapping[str, Tensor], measure: Measure) -> set[str]:
    """Return the methods that are best by a measure: those that no method is better than by more than chance.

    A method is worse if its mean is, to three decimals as tables show it, and p < :data:`LEVEL` in a sign-flip test
    against the method of the best mean, over examples.

    Args:
        values: the measure of each example, (N,), by method; examples with NaN are left out.
        measure: the measure.

    Returns:
        their names; none if no method is worse, so that the measure tells nothing apart.
    """
    kept = {name: one.double() for name, one in values.items() if not one.isnan().all()}
    means = {name: float(one.nanmean()) for name, one in kept.items()}
    if not means:
        return set()
    sign = 1 if measure.higher else -1
    top = max(means, key=lambda name: sign * means[name])
    worse = set()
    for name, one in kept.items():
        behind = sign * (kept[top] - one)
        behind = behind[~behind.isnan()]
        if round(means[name], 3) != round(means[top], 3) and len(behind) and sign_flip_p(behind) < LEVEL:
            worse.add(name)
    return kept.keys() - worse if worse else set()
