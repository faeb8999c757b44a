"""Runs ``captum-norm models``, which lists the supported models or checks a model."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from captum_norm.commands.command import Command
from captum_norm.commands.options import add_layouts, add_quantization, declare_layouts
from captum_norm.commands.outputs import add_reports, write_outputs
from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.results.tables import csv_text, json_text
from captum_norm.text.characters import spelled_out
from captum_norm.versions import versions

if TYPE_CHECKING:
    from captum_norm.commands.terminal import Terminal

SENTENCE = "The keys to the cabinet are on the table."
"""The input for a model with a tokenizer."""

POSITIONS = 12
"""The number of random tokens for a model without one."""


@dataclass(frozen=True)
class CheckedLayer:
    """The check of one attention layer.

    Attributes:
        stack: encoder, decoder or cross.
        layer: its index in the stack.
        module: the name of the module in which the block was found.
        layout: the arrangement of the layer.
        scopes: its scopes.
        error: the largest relative completeness error of its scopes.
    """

    stack: str
    layer: int
    module: str
    layout: str
    scopes: tuple[str, ...]
    error: float


@dataclass(frozen=True)
class Check:
    """The check of a model.

    Attributes:
        model: its name or folder, as given.
        model_type: its type in transformers.
        model_class: its class.
        dtype: the dtype of its weights.
        inputs: a description of the inputs.
        tolerance: the largest accepted completeness error.
        layers: its attention layers.
        without_feed_forward: for stacks without scopes through the feed-forward networks, the reason.
    """

    model: str
    model_type: str
    model_class: str
    dtype: str
    inputs: str
    tolerance: float
    layers: Sequence[CheckedLayer]
    without_feed_forward: Sequence[str]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        metavar="NAME_OR_PATH",
        help="run a model (a folder or a name on the Hugging Face hub, of a model or a PEFT adapter) once and show the "
        "structure of each layer and how exactly its vectors sum to the output (default: list the models in the tests)",
    )
    add_quantization(parser)
    add_layouts(parser)
    add_reports(parser, _REPORTS)


def _run(options: argparse.Namespace) -> None:
    from captum_norm.commands.terminal import Terminal

    console = Terminal()
    declare_layouts(options)
    if options.check is None:
        models = supported_models()
        _write(options, {"models": models}, models)
        _show_models(models, console)
    else:
        check = _check(options.check, options.quantize)
        content = asdict(check)
        _write(options, content, content["layers"])
        _show_check(check, console)
    for path in options.out:
        console.say(f"wrote {path}")


def supported_models() -> list[dict[str, Any]]:
    """Return the model architectures that the tests cover, by kind; others are recognised by structure, or refused.

    Each has its ``model_type``, the tested class, its layers' arrangement and scopes, how it encodes positions, and the
    further features that are active in the tests.
    """
    models: list[dict[str, Any]] = json.loads(
        resources.files("captum_norm.models").joinpath("supported.json").read_text(encoding="utf-8")
    )
    return models


def _show_models(models: Sequence[Mapping[str, Any]], console: "Terminal") -> None:
    for kind, group in groupby(models, key=lambda model: model["kind"]):
        console.say(f"{kind}:")
        columns = ("model_type", "model_class", "layout", "positions")
        rows = [(*(str(model[column]) for column in columns), ", ".join(model["special"])) for model in group]
        _table(console, ("model type", "tested class", "layout", "positions", "special"), rows)
        console.say("")
    console.say("Other models are recognised by their structure, or refused: captum-norm models --check NAME_OR_PATH")
    console.say("Files written with --out include the scopes")


def _show_check(check: Check, console: "Terminal") -> None:
    console.say(f"model: {check.model} ({check.model_type}, {check.model_class}, {check.dtype})")
    console.say(f"input: {check.inputs}")
    rows = [
        (layer.stack, str(layer.layer), layer.module, layer.layout, ", ".join(layer.scopes), f"{layer.error:.1e}")
        for layer in check.layers
    ]
    _table(console, ("stack", "layer", "module", "layout", "scopes", "error"), rows)
    for refusal in check.without_feed_forward:
        console.say(f"no scopes through a feed-forward network in the {refusal}")
    worst = max(layer.error for layer in check.layers)
    console.say(f"largest completeness error: {worst:.1e} (accepted: {check.tolerance:.0e})")


def _check(name: str, quantization: Any) -> Check:
    import torch

    from captum_norm.attr import TOLERANCE, NormMeter
    from captum_norm.loading import load_model

    model = load_model(name, quantization)
    inputs, description = _inputs(name, model)
    meter = NormMeter(model)
    measured = meter.measure(inputs, scopes=("attn", "atb"))
    several = len(measured) > 1
    layers, refusals = list[CheckedLayer](), list[str]()
    for stack in measured:
        found = measured[stack]
        try:
            stacks = [stack] if several else None
            found = meter.measure(inputs, scopes=("attn", "atb", "atb_ff_res"), stacks=stacks)[stack]
        except UnsupportedScopeError as error:
            refusals.append(f"{stack}: {error}")
        deltas = [] if found.convergence_delta is None else found.convergence_delta[0].tolist()
        described = zip(found.layer_names, found.layouts, found.layer_scopes, deltas, strict=True)
        layers += [
            CheckedLayer(stack, index, module, layout.style, scopes, delta)
            for index, (module, layout, scopes, delta) in enumerate(described)
        ]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return Check(
        model=name,
        model_type=str(model.config.model_type),
        model_class=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        inputs=description,
        tolerance=TOLERANCE[dtype],
        layers=layers,
        without_feed_forward=refusals,
    )


def _inputs(name: str, model: Any) -> tuple[dict[str, Any], str]:
    """The sentence for a model with a tokenizer, else random ids, pixels or features; and a description."""
    import torch

    from captum_norm.loading import load_tokenizer

    config = model.config
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config()
    ids = (
        torch.randint(0, text.vocab_size, (1, POSITIONS), generator=generator) if hasattr(text, "vocab_size") else None
    )
    inputs: dict[str, Any]
    if model.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size if isinstance(vision.image_size, list | tuple) else [vision.image_size] * 2
        inputs = {"pixel_values": torch.randn(1, vision.num_channels, *size, generator=generator).to(dtype)}
        description = "random pixels"
    elif model.main_input_name == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(1, config.num_mel_bins, frames, generator=generator).to(dtype)}
        description = "random features of a sound"
    elif model.main_input_name == "input_ids" and ids is not None:
        inputs, description = {"input_ids": ids}, f"{POSITIONS} random tokens"
        try:
            tokens = load_tokenizer(name)(SENTENCE, return_tensors="pt")
        except InvalidInputError:
            pass
        else:
            if int(tokens["input_ids"].max()) < text.vocab_size:
                inputs, description = dict(tokens), f'"{SENTENCE}"'
    else:
        raise InvalidInputError(
            f"cannot create an example of {model.main_input_name} for {type(model).__name__}; check it in Python: "
            'NormMeter(model).measure(inputs, scopes=["attn", "atb"])'
        )
    if config.is_encoder_decoder and ids is not None:
        inputs["decoder_input_ids"] = ids
    return inputs, description


def _write(options: argparse.Namespace, content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    write_outputs({path: _REPORTS[path.suffix.lower()](content, rows) for path in options.out})


def _json(content: Mapping[str, Any], _rows: Sequence[Mapping[str, Any]]) -> bytes:
    return json_text({**content, "versions": versions()}).encode()


def _csv(_content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bytes:
    cells = ([" ".join(v) if isinstance(v, (list, tuple)) else v for v in row.values()] for row in rows)
    return csv_text([list(rows[0]), *cells]).encode()


_REPORTS: Mapping[str, Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], bytes]] = MappingProxyType(
    {".json": _json, ".csv": _csv}
)


def _table(console: "Terminal", names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of one line each."""
    lines = [list(map(spelled_out, cells)) for cells in (names, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        console.say("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


COMMAND = Command("models", "list the models that are supported, or check your own", _add_arguments, _run)
