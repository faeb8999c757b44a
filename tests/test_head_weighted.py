"""The benchmark of learned weights of heads, on numbers whose answer is known."""

import re

import torch
from torch import Tensor

from benchmarks.head_weighted import cited, learned, page, scored
from captum_norm.lab.prompts import KINDS


def prompts(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Log-odds are what the second head's norms give the kept sources; weights and updates know nothing of them."""
    draw, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        features = torch.rand(3, 2, 2, 6, generator=draw, dtype=torch.float64)
        kept, other = (torch.rand(size, 6, generator=draw) < 0.5 for size in (48, 64))
        one = dict(zip(("weights", "norms", "updates"), features, strict=True))
        odds = {"lds": kept.double() @ features[1, 0, 1], "cited": other.double() @ features[1, 0, 1]}
        found.append({**one, **odds, "lds kept": kept, "cited kept": other, "tokens": torch.tensor(3)})
    return found


def test_the_head_that_knows_is_found_and_reported() -> None:
    taught, tested = prompts(20, 0), prompts(15, 1)
    weights = learned(taught, "norms")
    assert int(weights.argmax()) == 1
    assert weights[1] > 0.85
    assert min(scored(tested, "norms", weights)) > 0.9
    assert min(cited(tested, 64)) > 0.9
    text = page(taught, tested, 6, 4.2)
    assert "norms are better than attention weights (" in text
    assert re.search(r"updates are (worse than|no better than) attention weights \(", text)
    row = re.search(r"\| norms, learned \| (0\.\d+|1\.0+) ± [\d.]+ \| < \.001 \|(.*)", text)
    assert row is not None
    assert float(row[1]) > 0.95
    assert row[2].count("|") == len(KINDS)
    assert "| weights, learned |" in text
