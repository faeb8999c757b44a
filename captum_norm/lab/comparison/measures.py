"""The measures by which methods are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A column of the tables.

    Attributes:
        name: its name in frames and files; a score of :class:`captum_norm.lab.evaluation.FaithfulnessScores`.
        title: its title in tables.
        higher: whether higher is better.
        meaning: its meaning in one line.
    """

    name: str
    title: str
    higher: bool
    meaning: str

    @property
    def arrow(self) -> str:
        """↑ if higher is better, else ↓."""
        return "↑" if self.higher else "↓"

    def best(self, values: dict[str, float]) -> set[str]:
        """Return the names of the best values to three decimals, as tables show them; NaN is ignored."""
        known = {name: round(value, 3) for name, value in values.items() if value == value}
        top = (max if self.higher else min)(known.values(), default=None)
        return {name for name, value in known.items() if value == top}


MEASURES = (
    Measure("relevance_gain", "gain", True, "area between the curves: least relevant first minus most relevant first"),
    Measure("aopc", "AOPC", True, "mean drop of the output along the curve, most relevant tokens removed first"),
    Measure("comprehensiveness", "compr.", True, "drop without the highest-ranked tokens, mean over the bins"),
    Measure("sufficiency", "suff.", False, "drop with only the highest-ranked tokens, mean over the bins"),
    Measure("log_odds", "log-odds", False, "change of the log-probability without the highest-ranked tokens"),
    Measure("spearman", "ρ", True, "Spearman's rank correlation with leave-one-out"),
    Measure("kendall", "τ", True, "Kendall's rank correlation with leave-one-out"),
)
"""The measures in the order of the tables; the first one orders the rows."""
