"""A small result with every kind of table and plot."""

from captum_norm.lab.analysis.results import AnalysisResult, Column, Plot, Table

LAYERS = Table(
    "layers",
    "Norms by layer and <category>",
    (
        Column("layer", "layer"),
        Column("category", "category"),
        Column("norm", "‖f(x)‖"),
        Column("sd", "SD of ‖f(x)‖"),
        Column("rho", "Spearman’s ρ"),
    ),
    [
        (1, "[CLS]", 0.25, 0.125, -0.5),
        (1, "$x$", 2.5, 0.5, 0.75),
        (2, "[CLS]", 1.0, None, None),
        (2, "$x$", 1 / 3, 0.25, 0.25),
        (3, "[CLS]", None, None, -0.25),
        (3, "$x$", 12.0, 1.5, 1.0),
    ],
)
WORD_TABLE = Table("words", "Words", (Column("word", "word"), Column("count", "count")), [('a, "b"', 12), ("ÿ\nz", 3)])

LINE = Plot("norms", "line", "Norms by layer", "layers", "layer", "norm", "category", "sd")
HEAT = Plot("heat", "heat", "Correlation", "layers", "layer", "category", value="rho")

RESULT = AnalysisResult(
    "special-tokens",
    "What <special> tokens give.",
    {"mean of ‖f(x)‖": 2.682, "tokens": 251234.0, "undefined": None, "ρ": -0.5},
    [LAYERS, WORD_TABLE],
    [LINE, HEAT],
    {
        "model": "tiny",
        "corpus": {"name": "text & more", "sha256": "ab", "lines": 2},
        "seed": 0,
        "settings": {"layers": [1, 2], "limit": None},
        "command": "captum-norm analyze special-tokens --corpus 'text'",
    },
)
