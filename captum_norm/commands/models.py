"""Runs ``captum-norm models``, which lists the supported models or checks a model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_norm.commands.program import Command, Options, option
from captum_norm.commands.shared import output_path, quantize_option, write_outputs
from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.loading import Quantization
from captum_norm.results.tables import json_text
from captum_norm.text.characters import spelled_out
from captum_norm.versions import versions

if TYPE_CHECKING:
    from captum_norm.commands.terminal import Terminal

_POSITIONS = 12


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(Options):
    """The options of ``captum-norm models``."""

    check: str | None = option(
        "run a model or a PEFT adapter (a folder, or a name on the Hugging Face hub) once and show the structure of "
        "each layer and how exactly its vectors sum to the output (default: list the models that are tested)",
        metavar="NAME_OR_PATH",
    )
    quantize: Quantization | None = quantize_option()
    out: Path | None = option("also write a .json file", parse=output_path(".json"), metavar="FILE.json")


def _run(options: ModelsOptions) -> None:
    from captum_norm.commands.terminal import Terminal

    content = {"models": supported_models()} if options.check is None else _check(options.check, options.quantize)
    if options.out is not None:
        write_outputs({options.out: json_text({**content, "versions": versions()}).encode()})
    console = Terminal()
    if options.check is None:
        _show_models(content["models"], console)
    else:
        _show_check(content, console)
    if options.out is not None:
        console.say(f"wrote {options.out}")


def supported_models() -> list[dict[str, Any]]:
    """Return the model architectures that the tests cover, by kind; others are recognised by structure, or refused."""
    models: list[dict[str, Any]] = json.loads(
        resources.files("captum_norm.models").joinpath("supported.json").read_text(encoding="utf-8")
    )
    return models


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


def _check(name: str, quantization: Quantization | None) -> dict[str, Any]:
    """Run a model once; return its structure and how exactly the vectors of its layers sum to their outputs."""
    import torch

    from captum_norm.attr.layer_maps import TOLERANCE
    from captum_norm.attr.norms import NormMeter
    from captum_norm.loading import load_model

    model = load_model(name, quantization)
    inputs, description = _inputs(model)
    meter = NormMeter(model)
    measured = meter.measure(inputs, scopes=("attn", "atb"))
    layers, refusals = list[dict[str, Any]](), list[str]()
    for stack in measured:
        measurements = measured[stack]
        stacks = [stack] if len(measured) > 1 else None
        try:
            measurements = meter.measure(inputs, scopes=("attn", "atb", "atb_ff_res"), stacks=stacks)[stack]
        except UnsupportedScopeError as error:
            refusals.append(f"{stack}: {error}")
        deltas = measurements.convergence_delta
        described = zip(
            measurements.layer_names,
            measurements.layouts,
            measurements.layer_scopes,
            [] if deltas is None else deltas[0].tolist(),
            strict=True,
        )
        layers += [
            {"stack": stack, "layer": index, "module": module, "layout": layout.style, "scopes": scopes, "error": delta}
            for index, (module, layout, scopes, delta) in enumerate(described)
        ]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {
        "model": name,
        "model_type": str(model.config.model_type),
        "model_class": type(model).__name__,
        "dtype": str(dtype).removeprefix("torch."),
        "inputs": description,
        "tolerance": TOLERANCE[dtype],
        "layers": layers,
        "without_feed_forward": refusals,
    }


def _inputs(model: Any) -> tuple[dict[str, Any], str]:
    """Random ids, pixels or features, and a description."""
    import torch

    config = model.config
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config()
    ids = None
    if hasattr(text, "vocab_size"):
        ids = torch.randint(0, text.vocab_size, (1, _POSITIONS), generator=generator)
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
        inputs, description = {"input_ids": ids}, f"{_POSITIONS} random tokens"
    else:
        raise InvalidInputError(
            f"cannot create an example of {model.main_input_name} for {type(model).__name__}; check it in Python: "
            'NormMeter(model).measure(inputs, scopes=["attn", "atb"])'
        )
    if config.is_encoder_decoder and ids is not None:
        inputs["decoder_input_ids"] = ids
    return inputs, description


COMMAND = Command(
    "models",
    "list the supported models, or check your own",
    ModelsOptions,
    _run,
    example="captum-norm models --check openai-community/gpt2",
)
