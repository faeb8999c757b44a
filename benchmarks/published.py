"""The numbers that the papers report for BERT-base, and where an analysis has the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from captum_norm.lab.analysis.results import AnalysisResult, Cell

Find = Callable[[AnalysisResult], float | None]


@dataclass(frozen=True)
class Number:
    """One published number.

    Attributes:
        text: its description.
        paper: as the paper prints it.
        find: finds it in a result; None if the model has no such number.
        form: its format.
    """

    text: str
    paper: str
    find: Find
    form: str = ".2f"


@dataclass(frozen=True)
class Series:
    """A published share, in %, for each layer.

    Attributes:
        text: its description.
        paper: as the paper prints them, first layer first.
        find: finds it in a result, given the layer, from 0.
    """

    text: str
    paper: str
    find: Callable[[int], Find]


@dataclass(frozen=True)
class Claim:
    """One finding of a paper as a condition on the numbers of a result.

    Attributes:
        text: what the paper finds.
        left: the number that should be smaller.
        right: the number that should be larger.
        form: the format of both.
    """

    text: str
    left: Find
    right: Find
    form: str = ".2f"


@dataclass(frozen=True)
class Experiment:
    """One analysis and its published results.

    Attributes:
        analysis: its name.
        title: what the section is called.
        source: which paper, and what it was run on.
        numbers: the numbers.
        claims: the findings.
        series: numbers per layer.
        note: what else the paper reports.
        tables: tables of the result to print in full.
        lines: the maximum number of lines to read, for expensive analyses.
    """

    analysis: str
    title: str
    source: str
    numbers: tuple[Number, ...]
    claims: tuple[Claim, ...]
    series: tuple[Series, ...] = ()
    note: str = ""
    tables: tuple[str, ...] = ()
    lines: int | None = None


def cell(table: str, column: str, **where: Cell | tuple[Cell, ...]) -> Find:
    """Find a column's cell in the first row with the given other cells (each one of several)."""

    def find(result: AnalysisResult) -> float | None:
        found = rows(result, table, column, where)
        return found[0] if found else None

    return find


def headline(name: str) -> Find:
    """Find a headline number."""
    return lambda result: result.summary[name]


def last(table: str, column: str, **where: Cell | tuple[Cell, ...]) -> Find:
    """Find a column's cell in the last row with the given other cells."""

    def find(result: AnalysisResult) -> float | None:
        found = rows(result, table, column, where)
        return found[-1] if found else None

    return find


def greatest(table: str, column: str, **where: Cell | tuple[Cell, ...]) -> Find:
    """Find the maximum of a column over the rows with the given other cells."""
    return lambda result: max(rows(result, table, column, where), default=None)


def constant(number: float) -> Find:
    """Return the same number for every result."""
    return lambda _: number


def rows(result: AnalysisResult, table: str, column: str, where: Mapping[str, Cell | tuple[Cell, ...]]) -> list[float]:
    """Return a column's numbers in the rows with the given other cells."""
    found = result.table(table)
    wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in where.items()}
    kept = [all(found.column(name)[row] in values for name, values in wanted.items()) for row in range(len(found.rows))]
    return [float(value) for value, keep in zip(found.column(column), kept, strict=True) if keep and value is not None]


def size(find: Find) -> Find:
    """Find the absolute value."""

    def absolute(result: AnalysisResult) -> float | None:
        found = find(result)
        return None if found is None else abs(found)

    return absolute


CLS, END, MASK = ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>")
POINTS, OTHER = "comma, period", "other"


def _of_pairs(category: str | tuple[str, ...], column: str = "spearman") -> Find:
    return cell("correlation", column, category=category)


def _of_variant(name: str, column: str = "mean") -> Find:
    return cell("variants", column, variant=name)


def _of_sink(column: str, category: str | None = None) -> Find:
    """Find a value at the layer and special token of greatest weight, or at that layer for another category."""

    def find(result: AnalysisResult) -> float | None:
        found = result.table("layers")
        places = [place for place, name in enumerate(found.column("category")) if name in (*CLS, *END)]
        weights, layers, names = (found.column(name) for name in ("weight", "layer", "category"))
        sink = max(places, key=lambda place: weights[place] or 0)
        return cell("layers", column, layer=layers[sink], category=category or names[sink])(result)

    return find


EXPERIMENTS = (
    Experiment(
        "dispersion",
        "Lengths of transformed vectors",
        "Kobayashi et al. 2020; 992 Wikipedia sequences, 12 layers of 12 heads",
        (
            Number("‖f(x)‖, mean over heads", "5.15", cell("overall", "mean", what="mean over heads")),
            Number("SD, mean over heads", "1.17", cell("overall", "sd", what="mean over heads")),
            Number("coefficient of variation, mean over heads", ".22", cell("overall", "cv", what="mean over heads")),
            Number("maximum over heads", ".37", cell("overall", "cv", what="largest variation")),
            Number("‖f(x)‖ of that head, mean", "4.26", cell("overall", "mean", what="largest variation")),
            Number("minimum over heads", ".12", cell("overall", "cv", what="smallest variation")),
            Number("‖f(x)‖ of that head, mean", "4.00", cell("overall", "mean", what="smallest variation")),
        ),
        (),
    ),
    Experiment(
        "special-tokens",
        "Weights and lengths by category of token",
        "Kobayashi et al. 2020; the same sequences",
        (
            Number("ρ(α, ‖f(x)‖), [CLS]", "−.34", _of_pairs(CLS)),
            Number("ρ(α, ‖f(x)‖), [SEP], here also `</s>`", "−.69", _of_pairs(END)),
            Number("ρ(α, ‖f(x)‖), comma and period", "−.25", _of_pairs(POINTS)),
            Number("ρ(α, ‖f(x)‖), other", "−.06", _of_pairs(OTHER)),
            Number("Σα of [CLS], maximum over layers", "–", greatest("layers", "weight", category=CLS)),
            Number("Σ‖αf(x)‖ of [CLS], maximum over layers", "0–.4", greatest("layers", "product", category=CLS)),
            Number("Σα of [SEP], maximum over layers", ".55–.6", greatest("layers", "weight", category=END)),
            Number("Σ‖αf(x)‖ of [SEP], maximum over layers", "0–.4", greatest("layers", "product", category=END)),
            Number("Σ‖αf(x)‖ of other, maximum over layers", "1.8–3.4", greatest("layers", "product", category=OTHER)),
        ),
        (
            Claim("more weight on [CLS] goes with shorter f(x): ρ < 0", _of_pairs(CLS), constant(0)),
            Claim("the same for [SEP]", _of_pairs(END), constant(0)),
            Claim("the same for comma and period", _of_pairs(POINTS), constant(0)),
            Claim("more so for [SEP] than for other tokens: smaller ρ", _of_pairs(END), _of_pairs(OTHER)),
            Claim(
                "where a special token gets the most weight, it gives less than other tokens: Σ‖αf(x)‖",
                _of_sink("product"),
                _of_sink("product", OTHER),
            ),
        ),
    ),
    Experiment(
        "frequency",
        "Frequency of tokens",
        "Kobayashi et al. 2020; the same sequences. Frequent tokens have small ranks",
        (
            Number("ρ(rank, ‖f(x)‖)", ".75", cell("correlation", "spearman", measure="‖f(x)‖")),
            Number("ρ(rank, α)", ".06", cell("correlation", "spearman", measure="attention weight α")),
        ),
        (
            Claim(
                "f(x) of frequent tokens is shorter: ρ(rank, ‖f(x)‖) > 0",
                constant(0),
                cell("correlation", "spearman", measure="‖f(x)‖"),
            ),
            Claim(
                "weights depend less on frequency than lengths do: magnitude of ρ",
                size(cell("correlation", "spearman", measure="attention weight α")),
                size(cell("correlation", "spearman", measure="‖f(x)‖")),
            ),
        ),
    ),
    Experiment(
        "mixing-ratio",
        "Mixing ratio",
        "Kobayashi et al. 2021; 12 % of the tokens masked. Means from the paper and, in brackets, its notebook",
        (
            Number("mean, Attn-W", "97.1 % (96.41 %)", _of_variant("Attn-W"), ".1%"),
            Number("mean, Attn-N", "85.2 % (85.28 %)", _of_variant("Attn-N"), ".1%"),
            Number("mean, AttnRes-W", "48.6 % (48.21 %)", _of_variant("AttnRes-W"), ".1%"),
            Number("mean, AttnRes-N", "22.3 % (22.25 %)", _of_variant("AttnRes-N"), ".1%"),
            Number("mean, AttnResLn-N", "18.8 % (18.75 %)", _of_variant("AttnResLn-N"), ".1%"),
            Number("ρ(rank, Attn-W)", ".159", _of_variant("Attn-W", "frequency"), ".3f"),
            Number("ρ(rank, Attn-N)", "−.387", _of_variant("Attn-N", "frequency"), ".3f"),
            Number("ρ(rank, AttnRes-N)", "−.839", _of_variant("AttnRes-N", "frequency"), ".3f"),
            Number("ρ(rank, AttnResLn-N)", "−.544", _of_variant("AttnResLn-N", "frequency"), ".3f"),
        ),
        (
            Claim("norms show less mixing than weights", _of_variant("Attn-N"), _of_variant("Attn-W"), ".2%"),
            Claim("also with the residual connection", _of_variant("AttnRes-N"), _of_variant("AttnRes-W"), ".2%"),
            Claim("normalisation reduces mixing", _of_variant("AttnResLn-N"), _of_variant("AttnRes-N"), ".2%"),
            Claim("less than half of an output is mixed in", _of_variant("AttnResLn-N"), constant(0.5), ".2%"),
            Claim(
                "the last layer mixes less than the first",
                last("layers", "mean", variant="AttnResLn-N"),
                cell("layers", "mean", variant="AttnResLn-N"),
                ".2%",
            ),
            Claim(
                "frequent tokens mix in more, by AttnRes-N: ρ(rank) < 0",
                _of_variant("AttnRes-N", "frequency"),
                constant(0),
            ),
            Claim("the same by AttnResLn-N", _of_variant("AttnResLn-N", "frequency"), constant(0)),
            Claim("but not by Attn-W", constant(0), _of_variant("Attn-W", "frequency")),
        ),
        series=(
            Series(
                "AttnResLn-N in %, all tokens",
                "24 20 19 21 19 20 20 20 17 19 15 11",
                lambda layer: cell("layers", "mean", layer=layer, variant="AttnResLn-N"),
            ),
            Series(
                "AttnResLn-N in %, [MASK]",
                "15 17 16 21 21 25 25 30 25 22 19 10",
                lambda layer: cell("end-of-block", "mean", layer=layer, category=MASK),
            ),
        ),
        note=(
            "For RoBERTa-base (`--model roberta-base`) the paper reports Attn-W 95.8 %, Attn-N 84.4 %, AttnRes-W "
            "47.9 %, AttnRes-N 19.6 %, AttnResLn-N 16.2 %.\n"
        ),
    ),
    Experiment(
        "expansion-rate",
        "Expansion rate",
        "Kobayashi et al. 2021; f depends on the weights alone",
        (Number("mean of the affine map f", ".877", headline("mean expansion rate of f"), ".3f"),),
        (Claim("f shortens vectors: rate below 1", headline("mean expansion rate of f"), constant(1)),),
        note="For RoBERTa-base (`--model roberta-base`) the paper reports 1.30.\n",
        tables=("layers",),
    ),
    Experiment(
        "contextualization-change",
        "Contextualisation change",
        "Kobayashi et al. 2024 has figures but no numbers to compare with",
        (),
        (),
        tables=("components",),
        lines=500,
    ),
)
