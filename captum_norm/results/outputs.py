"""What a result is of: an output of the model by name, with its value, its probability and the model's first three."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NamedOutput", "facts_of_outputs", "named_alone", "share_text"]

TOP = 3
"""How many of the model's outputs are named beside the one explained."""

_MOST = 5


@dataclass(frozen=True)
class NamedOutput:
    """An output of the model for one example: what a result explains, or what the model predicts.

    Attributes:
        index: the number of the class or token, of a difference both numbers; None if the output is one number.
        name: its label, token or text, of a difference ``"A − B"``.
        value: the number itself, such as a logit.
        probability: softmax, or sigmoid if the model is a multi-label classifier; None for regression, differences,
            similarities and readouts.
        top: the three highest outputs there: the name of each, and its probability, or its value where there is none.
        explained: whether scores explain this number; if not, they explain a hidden state, and this is the prediction.

    Example:
        >>> str(NamedOutput(1, "sad", 2.3, 0.812))
        'sad, 0.81'
    """

    index: int | tuple[int, int] | None
    name: str
    value: float
    probability: float | None = None
    top: Sequence[tuple[str, float]] = ()
    explained: bool = True

    def __str__(self) -> str:
        """Format the name and the probability, or the value where there is none."""
        if self.probability is not None:
            return f"{_quoted(self.name)}, {share_text(self.probability)}"
        return _quoted(self.name) if self.value != self.value else f"{_quoted(self.name)} = {self.value:.3g}"

    def facts(self) -> dict[str, str]:
        """Return what to show beside scores: the output as explained or predicted, and the model's first three."""
        facts = {"explained" if self.explained else "prediction": str(self)}
        if len(self.top) > 1:
            shown = share_text if all(0 <= number <= 1 for _, number in self.top) else "{:.3g}".format
            facts["top 3"] = ", ".join(f"{_quoted(name)} {shown(number)}" for name, number in self.top)
        return facts

    def record(self) -> dict[str, object]:
        """Return the fields as columns of a table."""
        return {"output": self.name, "value": self.value, "probability": self.probability}


def facts_of_outputs(outputs: Sequence[NamedOutput]) -> dict[str, str]:
    """Return what to show beside the scores of several examples: the facts of the only one, else the first outputs."""
    if len(outputs) < 2:
        return outputs[0].facts() if outputs else {}
    more = ["…"] * (len(outputs) > _MOST)
    return {next(iter(outputs[0].facts())): "; ".join([*map(str, outputs[:_MOST]), *more])}


def named_alone(names: Sequence[str]) -> list[dict[str, object]]:
    """Return the content of outputs of which earlier files have the names alone."""
    return [{**vars(NamedOutput(None, name, 0.0)), "value": "nan", "top": []} for name in names]


def _quoted(name: str) -> str:
    """Quote a name whose ends would not be seen, such as that of a token."""
    return name if name and name == name.strip() else f"“{name}”"


def share_text(share: float) -> str:
    """Format a probability: two decimals, or its first digit if it is smaller."""
    return f"{share:.2f}" if share >= 0.005 or share == 0 else f"{share:.0e}"
