"""Runs ``captum-norm models``, which lists the supported models or checks a model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import resources
from itertools import groupby
from pathlib import Path
from platform import machine, python_version, system
from typing import TYPE_CHECKING, Any

from captum_norm.commands.program import Command, Options, option
from captum_norm.commands.shared import output_path, quantize_option, write_outputs
from captum_norm.errors import CaptumNormError
from captum_norm.loading import Quantization
from captum_norm.results.tables import json_text
from captum_norm.text.characters import spelled_out
from captum_norm.versions import versions

if TYPE_CHECKING:
    from captum_norm.commands.terminal import Terminal


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(Options):
    """The options of ``captum-norm models``."""

    check: str | None = option(
        "run a model or a PEFT adapter (a folder, or a name on the Hugging Face hub) once and show the structure of "
        "each layer and how exactly its vectors sum to the output (default: list the models that are tested)",
        metavar="NAME_OR_PATH",
        exclusive=True,
    )
    verify: str | None = option("check also what is promised", metavar="NAME_OR_PATH", exclusive=True)
    quantize: Quantization | None = quantize_option()
    out: Path | None = option("also write a .json file", parse=output_path(".json"), metavar="FILE.json")


def _run(options: ModelsOptions) -> None:
    from captum_norm.commands.terminal import Terminal

    name = options.check if options.verify is None else options.verify
    content: dict[str, Any] = {"models": supported_models()} if name is None else {"model": name}
    console = Terminal()
    if name is None:
        _show_models(content["models"], console)
    else:
        from captum_norm.commands.promises import Subject, checked
        from captum_norm.loading import load_model

        subject = Subject(load_model(name, options.quantize))
        content |= subject.structure()
        _show_check(content, console)
        if options.verify is not None:
            content |= {"length": subject.length, "revision": getattr(subject.model.config, "_commit_hash", None)}
            content |= {
                "promises": checked(subject, console),
                "platform": f"{system()} {machine()}, Python {python_version()}",
            }
            content["date"] = str(date.today())
        console.say(verification(name))
    if options.out is not None:
        write_outputs({options.out: json_text({**content, "versions": versions()}).encode()})
        console.say(f"wrote {options.out}")
    refuse_broken(content.get("promises", {}))


def supported_models(file: str = "supported.json") -> list[dict[str, Any]]:
    """Return the model architectures that the tests cover, by kind; others are recognised by structure, or refused."""
    text = resources.files("captum_norm.models").joinpath(file).read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def verification(name: str) -> str:
    """Say in one sentence what was verified of a checkpoint, and what is not promised."""
    for report in supported_models("verified.json"):
        if report["model"] == name:
            where = f"in {report['dtype']} up to {report['length']} positions by {report['by']}, {report['date']}"
            return f"{name} was verified {where}; not promised: other lengths, precisions, devices and versions"
    return f"{name} is not among the verified checkpoints: captum-norm models --verify {name}"


def refuse_broken(found: Mapping[str, Mapping[str, Any]]) -> None:
    """End the command with an error if a promise does not hold."""
    if broken := [promise for promise, finding in found.items() if not finding["held"]]:
        raise CaptumNormError(f"what is promised does not hold here: {', '.join(broken)}")


def _show_models(models: Sequence[Mapping[str, Any]], console: "Terminal") -> None:
    columns = {"model type": "model_type", "tested class": "model_class", "layout": "layout", "positions": "positions"}
    for kind, group in groupby(models, key=lambda model: model["kind"]):
        console.say(f"{kind}:")
        rows = [[*(model[name] for name in columns.values()), ", ".join(model["special"])] for model in group]
        _print_table(console, [*columns, "special"], rows)
        console.say("")
    console.say("Other models are recognised by their structure, or refused: captum-norm models --check NAME_OR_PATH")
    console.say("Files written with --out include the scopes")


def _show_check(check: Mapping[str, Any], console: "Terminal") -> None:
    console.say(f"model: {check['model']} ({check['model_type']}, {check['model_class']}, {check['dtype']})")
    console.say(f"input: {check['inputs']}")
    layers = check["layers"]
    rows = [
        [*map(str, list(layer.values())[:4]), ", ".join(layer["scopes"]), f"{layer['error']:.1e}"] for layer in layers
    ]
    _print_table(console, list(layers[0]), rows)
    for refusal in check["without_feed_forward"]:
        console.say(f"no scopes through a feed-forward network in the {refusal}")
    worst = max(layer["error"] for layer in layers)
    console.say(f"largest completeness error: {worst:.1e} (accepted: {check['tolerance']:.0e})")


def _print_table(console: "Terminal", names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of one line each."""
    lines = [list(map(spelled_out, cells)) for cells in (names, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        console.say("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


COMMAND = Command(
    "models",
    "list the supported models, or check your own",
    ModelsOptions,
    _run,
    example="captum-norm models --check openai-community/gpt2",
)
