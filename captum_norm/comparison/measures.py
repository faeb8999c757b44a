"""Lists the measures by which methods are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A column of the tables.

    Attributes:
        name: in frames and files; a score of :class:`captum_norm.evaluation.FaithfulnessScores`.
        title: what tables call it.
        higher: whether higher is better.
        meaning: in one line.
    """

    name: str
    title: str
    higher: bool
    meaning: str

    @property
    def arrow(self) -> str:
        """Which way is better, ↑ or ↓."""
        return "↑" if self.higher else "↓"

    def best(self, values: dict[str, float]) -> set[str]:
        """Who has the best of some values, NaN aside, to the three decimals that tables show."""
        known = {name: round(value, 3) for name, value in values.items() if value == value}
        top = (max if self.higher else min)(known.values(), default=None)
        return {name for name, value in known.items() if value == top}


MEASURES = (
    Measure("relevance_gain", "gain", True, "area between the curves: least relevant first less most relevant first"),
    Measure("aopc", "AOPC", True, "mean drop of the output along the curve, most relevant tokens removed first"),
    Measure("comprehensiveness", "compr.", True, "drop without the highest-ranked tokens, mean over the bins"),
    Measure("sufficiency", "suff.", False, "drop with nothing but the highest-ranked tokens, mean over the bins"),
    Measure("log_odds", "log-odds", False, "change of the log-probability without the highest-ranked tokens"),
    Measure("spearman", "ρ", True, "Spearman's rank correlation with leave-one-out"),
    Measure("kendall", "τ", True, "Kendall's rank correlation with leave-one-out"),
)
"""In the order of the tables; their rows are ordered by the first."""
