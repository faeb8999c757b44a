"""The list of supported models, from the families in the tests: ``python -m tests.support`` writes it.

As data, which ``captum-norm models`` prints, and as a page of the documentation.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from packaging.version import Version

from captum_norm.commands.models import supported_models
from captum_norm.models.model import refusals
from tests import feed_forwards
from tests.encoder_decoders import ENCODER_DECODERS, EncoderDecoder
from tests.families import EVERY, FURTHER, KINDS, Family
from tests.families.images import VISION_LANGUAGE
from tests.test_matrix import SCOPES
from tests.versions import SINCE, pinned

ROOT = Path(__file__).parents[1]
DATA = ROOT / "captum_norm" / "models" / "supported.json"
PAGE = ROOT / "docs" / "supported-models.md"

HEAD = """# Supported models

<!-- python -m tests.support writes this page; the tests hold that it is up to date. -->

The tests compare each of these {count} architectures with an independent implementation that forms every vector in
float64, with random weights (in float32 where a model's code cannot run in float64). They also check what holds for
every model: padding changes nothing, gradients flow, and the model is left unchanged; in {full} of them that half
precision is close; and with every method, for a model of each kind, that batching changes nothing. Features under
*special* are active: windows are shorter than the inputs, sinks and layer scales have random values. After the
feed-forward block, every vector is formed independently in {formed} of them; in the others, the vectors are checked
to add up to what the model computed.

{later}

`captum-norm models` prints this list; [below](#verified-checkpoints) are pretrained checkpoints that were verified.

Other models are found by their structure or refused with a reason; `captum-norm models --check NAME_OR_PATH` checks
yours. [Describe a new model](how-to/describe-a-model.md) explains the layouts and what to do if a model is refused,
[Methods](methods.md) the scopes. Hybrids, whose layers mix positions by more than attention, are explained layer by
layer ([limitations](methods-computed.md#limitations)); the tests cover Jamba, Bamba, Granite 4 (`granitemoehybrid`),
Nemotron-H, Qwen3-Next, LFM2, RecurrentGemma, MiniMax, DeBERTa-v2 with its convolution, and the weights of
Falcon-H1 and Zamba2.
"""
NOTES = {
    "Encoder–decoders": "Scopes are those of the encoder and of cross-attention. The decoder's self-attention has "
    "those up to `atb`, because\ncross-attention follows it, not a feed-forward network.\n\n",
    "Images and text": "Layout, positions and scopes are those of the text model, which is explained over patches and "
    "words together; the\nvision towers, all pre-norm, are compared in the same way: see "
    "[Explain images](how-to/explain-images.md).\n\n",
}
WITHOUT = "`{model_type}` has no scopes through its feed-forward network: {reason}."
REFUSED = """
## Refused

These architectures are refused, each with its reason, which the tests hold too. `AttentionWeights` still explains those
whose attention alone is understood.

| model type | reason |
| --- | --- |
"""
TAIL = """
A head on top of these layers (a classifier, a language model) changes nothing. Rows of one type differ in a setting
that changes the layout. Models of fairseq and models built with `torch.nn` are tested as well.
"""
CHECKPOINTS = """
## Verified checkpoints

Reports of `captum-norm models --verify NAME_OR_PATH --out report.json`, in `captum_norm/models/verified.json`: on these
weights, all [promises](trust.md) held. `fr-en` and `en-fr` are the translation models of `alignment`, saved by
`save_pretrained`. Send yours as an issue, *A verified checkpoint*. What is not listed may work as well: each call
checks itself.

| checkpoint | class | precision | layers | largest error | positions | versions | by, date |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
LATER = (
    "They run with transformers {lowest}, but for these, whose code came or took its present form later: {later}. "
    "`make test-lowest` holds both."
)
COLUMNS = ("model type", "tested class", "layout", "positions", "special", "scopes")


def supported() -> Iterator[dict[str, Any]]:
    """What the families say, in their order."""
    for kind, families in KINDS.items():
        if kind == "Vision":
            for name, pair in ENCODER_DECODERS.items():
                yield _entry("Encoder–decoders", name, pair, pair.layout)
        for name, family in families.items():
            yield _entry(kind, name, family, family.style)
    for name, both in VISION_LANGUAGE.items():
        yield _entry("Images and text", name, both.text, both.text.style)


def _entry(kind: str, name: str, family: Family | EncoderDecoder, layout: str) -> dict[str, Any]:
    model: Any = family.build()
    behind = () if name in feed_forwards.NOT_UNDERSTOOD else feed_forwards.SCOPES[layout]
    scopes = (*SCOPES[layout], *behind)
    return {
        "kind": kind,
        "model_type": model.config.model_type,
        "model_class": type(model).__name__,
        "layout": layout,
        "positions": family.positions,
        "special": list(family.special),
        "scopes": list(scopes),
    }


def data(models: list[dict[str, Any]]) -> str:
    """As JSON, one model a line."""
    lines = ",\n".join(json.dumps(model, ensure_ascii=False) for model in models)
    return f"[\n{lines}\n]\n"


def page(models: list[dict[str, Any]]) -> str:
    """As a page of the documentation."""
    full = len(models) - len(FURTHER | VISION_LANGUAGE)
    since = {model["model_type"]: SINCE[model["model_class"]] for model in models if model["model_class"] in SINCE}
    ordered = sorted(since.items(), key=lambda pair: Version(pair[1]))
    groups = (
        f"from {version} on {', '.join(f'`{name}`' for name, _ in group)}"
        for version, group in groupby(ordered, key=lambda pair: pair[1])
    )
    later = LATER.format(lowest=pinned("constraints-lowest.txt")["transformers"], later="; ".join(groups))
    counts = {"count": len(models), "full": full, "formed": len(feed_forwards.PARTS)}
    parts = [HEAD.format(**counts, later=fill(later, 120, break_on_hyphens=False))]
    for kind, group in groupby(models, key=lambda model: model["kind"]):
        rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, group)]
        parts.append(f"\n## {kind}\n\n{NOTES.get(kind, '')}" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    every: dict[str, Any] = {**EVERY, **ENCODER_DECODERS}
    reasons = [
        WITHOUT.format(model_type=every[name].build().config.model_type, reason=reason)
        for name, reason in feed_forwards.NOT_UNDERSTOOD.items()
    ]
    verified = map(_report_row, supported_models("verified.json"))
    refused = (f"| {', '.join(f'`{name}`' for name in row['model_types'])} | {row['reason']} |\n" for row in refusals())
    without = (f"\n{fill(reason, 120)}\n" for reason in reasons)
    return "".join([*parts, *without, TAIL, CHECKPOINTS, *verified, REFUSED, *refused])


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    scopes = " ".join(f"`{scope}`" for scope in model["scopes"])
    special = ", ".join(model["special"])
    return (f"`{model['model_type']}`", model["model_class"], model["layout"], model["positions"], special, scopes)


def _report_row(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "transformers"))
    error = f"{max(layer['error'] for layer in report['layers']):.0e}"
    columns = (
        *(f"`{report['model']}`", report["model_class"], report["dtype"], len(report["layers"]), error),
        *(report["length"], versions, f"{report['by']}, {report['date']}"),
    )
    return f"| {' | '.join(map(str, columns))} |\n"


if __name__ == "__main__":
    found = list(supported())
    DATA.write_text(data(found), encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
