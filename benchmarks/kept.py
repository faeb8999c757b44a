"""Keeps results of a long benchmark in files, so that an interrupted run resumes and a new method is run alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from captum.attr import Attribution

from captum_norm.lab.evaluation import agreement
from captum_norm.loading import load

Content = Mapping[str, Any]
Make = Callable[[Any, Any], Attribution]
Methods = Mapping[str, str | Make]
"""Methods by their names in tables: the name of one, or a function that makes one for a model and its tokenizer."""
ROLLED = ("norm", "attention-block", "alti", "information-flow", "value-zeroing")
"""Measured by the rollout of their layers, also in a causal model, whose default is their mean."""
Merge = Callable[[Content, Content], Content]
Opener = Callable[[], tuple[Any, Any]]
"""Loads the model to explain and its tokenizer, when they are needed."""
T = TypeVar("T")


def kept(path: Path, make: Callable[[], str]) -> Any:
    """Read a JSON file, made first if missing."""
    if not path.exists():
        written(path, make())
    return json.loads(path.read_text(encoding="utf-8"))


def written(path: Path, content: str) -> None:
    """Write a file as a whole."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)


def kept_methods(
    path: Path, methods: Mapping[str, T], run: Callable[[Mapping[str, T]], str], merge: Merge | None = None
) -> Content:
    """Read the results of methods from a JSON file; those it lacks are run first, and written to it.

    Args:
        path: the file; its entry ``methods`` has a record with the name of each ``method``.
        methods: the methods wanted, by name.
        run: returns the results of some of them as JSON.
        merge: joins two results; None for :func:`merged`.

    Returns:
        the results of the methods in the file, those no longer wanted included.
    """
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    done = set() if content is None else {row["method"] for row in content["methods"]}
    missing = {name: method for name, method in methods.items() if name not in done}
    if missing:
        new = json.loads(run(missing))
        content = new if content is None else (merged if merge is None else merge)(content, new)
        written(path, json.dumps(content, ensure_ascii=False))
    return content or {}


def opened(folder: Path, device: str) -> tuple[Any, Any]:
    """Load a model on a device, and its tokenizer."""
    loaded: tuple[Any, Any] = load(str(folder))
    return loaded[0].to(device), loaded[1]


def made(methods: Methods, model: Any, tokenizer: Any) -> dict[str, str | Attribution]:
    """Make the methods for a model that are not known by name."""
    return {name: method if isinstance(method, str) else method(model, tokenizer) for name, method in methods.items()}


def merged(old: Content, new: Content) -> Content:
    """Join two comparisons of other methods on the same examples: those of ``.json`` files.

    Raises:
        ValueError: they differ in examples, or in a choice or version that changes numbers.
    """
    for name in ("signature", "outputs"):
        if old.get(name) != new[name]:
            raise ValueError(f"the kept results have another {name}; remove their file to make them anew")
    scores = [one | other for one, other in zip(old["scores"], new["scores"], strict=True)]
    methods = [*old["methods"], *new["methods"]]
    names = [row["method"] for row in methods if row["refused"] is None]
    return {
        **old,
        "methods": methods,
        "scores": scores,
        "agreement": agreements(scores, names),
        "curves": [*old["curves"], *new["curves"]],
    }


def agreements(scores: Sequence[Content], names: Sequence[str]) -> list[Content]:
    """Return Spearman's ρ between methods, a record each, from the scores of a comparison's tokens."""
    examples = 1 + max(row["example"] for row in scores)
    positions = 1 + max(row["position"] for row in scores)
    tensors = {name: torch.zeros(examples, positions) for name in names}
    removable = torch.zeros(examples, positions, dtype=torch.bool)
    for row in scores:
        place = row["example"], row["position"]
        removable[place] = row["removable"]
        for name in names:
            tensors[name][place] = row[name]
    found = agreement(tensors, removable).tolist()
    return [{"method": name, **dict(zip(names, row, strict=True))} for name, row in zip(names, found, strict=True)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def passes(row: Content) -> str:
    """Format a method's time in forward passes."""
    ratio = row["forward_ratio"]
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def refusals(content: Content) -> list[str]:
    """Return a list of the methods that refuse the model, if there are some."""
    refused = [f"- {row['method']}: {row['refused']}" for row in content["methods"] if row["refused"] is not None]
    return ["Refused for this model:\n\n" + "\n".join(refused)] if refused else []
