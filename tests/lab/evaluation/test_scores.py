"""Scores of outputs, written out."""

import torch

from captum_norm.lab.evaluation import area, mean_drop, relevance_gain


def test_scores_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(3, generator=generator, dtype=torch.float64)
    morf, lerf = torch.rand(2, 3, 6, generator=generator, dtype=torch.float64)
    for row in range(3):
        drops = [float(whole[row] - value) for value in morf[row]]
        assert abs(float(mean_drop(whole, morf)[row]) - sum(drops) / 6) < 1e-15
        areas = [
            sum((float(curve[row, step]) + float(curve[row, step + 1])) / 2 / 5 for step in range(5))
            for curve in (morf, lerf)
        ]
        assert abs(float(area(morf)[row]) - areas[0]) < 1e-15
        assert abs(float(relevance_gain(morf, lerf)[row]) - (areas[1] - areas[0])) < 1e-15
