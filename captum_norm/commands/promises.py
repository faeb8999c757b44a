"""Checks on a model what the library promises: exact, fast, untouched, safe, resumable, deterministic."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, cast

import torch
from torch import Tensor

from captum_norm import AttentionMapAttribution, AttributionMaps, NormAttribution, NormMeter
from captum_norm.attr.layer_maps import TOLERANCE
from captum_norm.commands.terminal import Terminal
from captum_norm.errors import CaptumNormError, InvalidInputError, UnsupportedScopeError
from captum_norm.forward.record import Layer
from captum_norm.loading import load_model
from captum_norm.models import longest_sequence
from captum_norm.results.maps import MapUnits
from captum_norm.runs import Block, Job, Journal, Record, cut, run_job

_LONGEST = 1024  # a longer sequence takes minutes on a processor
_SLOWEST, _OVERHEAD = 4, 0.2  # forward passes, and seconds in which a call of a tiny model is over


class Subject:
    """A model that is checked on random inputs, its precision, and the number of positions that is full length."""

    def __init__(self, model: Any) -> None:
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", _LONGEST)
        self.length = min(longest_sequence(model) or positions, _LONGEST)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.model, self.tolerance = model, TOLERANCE[self.dtype]

    def inputs(self, length: int = 12, seed: int = 0) -> tuple[dict[str, Any], str]:
        """Make random ids, pixels or features, and describe them."""
        config, model, generator = self.model.config, self.model, torch.Generator().manual_seed(seed)
        inputs, size = dict[str, Any](), getattr(config.get_text_config(), "vocab_size", None)
        ids = None if size is None else torch.randint(0, size, (1, length), generator=generator)
        if model.main_input_name == "pixel_values":
            vision = getattr(config, "vision_config", config)
            size = vision.image_size if isinstance(vision.image_size, list | tuple) else [vision.image_size] * 2
            inputs = {"pixel_values": torch.randn(1, vision.num_channels, *size, generator=generator).to(self.dtype)}
            description = "random pixels"
        elif model.main_input_name == "input_features" and hasattr(config, "max_source_positions"):
            frames = 2 * config.max_source_positions
            inputs = {"input_features": torch.randn(1, config.num_mel_bins, frames, generator=generator).to(self.dtype)}
            description = "random features of a sound"
        elif model.main_input_name == "input_ids" and ids is not None:
            inputs, description = {"input_ids": ids}, f"{length} random tokens"
        else:
            raise InvalidInputError(
                f"cannot create an example of {model.main_input_name} for {type(model).__name__}; check it in Python: "
                'NormMeter(model).measure(inputs, scopes=["attn", "atb"])'
            )
        if config.is_encoder_decoder and ids is not None:
            inputs["decoder_input_ids"] = ids
        return inputs, description

    def maps(self, length: int = 12, seed: int = 0) -> AttributionMaps:
        """Explain an example by norms."""
        return NormAttribution(self.model).maps(self.inputs(length, seed)[0])

    def output(self, length: int = 12) -> Tensor:
        """Run the model as it is."""
        with torch.no_grad():
            return self.model(**self.inputs(length)[0])[0]  # type: ignore[no-any-return]

    def state(self) -> Any:
        """Collect what explaining the model must not change."""
        modules = list(self.model.modules())
        hooks = [tuple(kept) for part in modules for name, kept in vars(part).items() if name.endswith("_hooks")]
        weights = [(float(weight.detach().double().sum()), weight._version) for weight in self.model.parameters()]
        return hooks, weights, [(frozenset(vars(part)), part.training) for part in modules], self.model.config.to_dict()

    def structure(self) -> dict[str, Any]:
        """Run the model once; return its structure and how exactly the vectors of its layers sum to their outputs."""
        (inputs, description), meter = self.inputs(), NormMeter(self.model)
        layers, refusals = list[dict[str, Any]](), list[str]()
        stacks = meter.measure(inputs, scopes=("attn", "atb"))
        for stack, found in stacks.items():
            only: Any = [stack] if len(stacks) > 1 else None
            try:
                found = meter.measure(inputs, scopes=("attn", "atb", "atb_ff_res"), stacks=only)[stack]  # noqa: PLW2901
            except UnsupportedScopeError as error:
                refusals.append(f"{stack}: {error}")
            errors = cast(Tensor, found.convergence_delta)[0].tolist()
            columns = found.layer_names, [layout.style for layout in found.layouts], found.layer_scopes, errors
            for index, row in enumerate(zip(*columns, strict=True)):
                names = ("stack", "layer", "module", "layout", "scopes", "error")
                layers.append(dict(zip(names, (stack, index, *row), strict=True)))
        return {
            "model_type": str(self.model.config.model_type),
            "model_class": type(self.model).__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "inputs": description,
            "tolerance": self.tolerance,
            "layers": layers,
            "without_feed_forward": refusals,
        }


class _Formed(AttentionMapAttribution):
    """Norms of vectors that are all formed, in float64; it can be interrupted while the model runs."""

    name, units, interrupted = "norms-formed", MapUnits("norm"), False

    def layer_map(self, layer: Layer) -> Tensor:
        if self.interrupted:
            raise KeyboardInterrupt
        return cast(Tensor, layer.at("attn").in_float64().vectors().norm(dim=-1))


def _stacks(maps: AttributionMaps) -> list[Tensor]:
    return [stack for stack in (maps.encoder, maps.decoder, maps.cross) if stack is not None]


def _deviation(maps: AttributionMaps, others: AttributionMaps) -> float:
    """Compute the largest difference of the first example's maps, relative to the largest entry of a stack."""
    pairs = zip(_stacks(maps), _stacks(others), strict=True)
    return max(float((a[0] - b[0]).abs().max() / b[0].abs().max()) for a, b in pairs)


def _exact(subject: Subject) -> tuple[bool, str]:
    (inputs, described), seen = subject.inputs(subject.length), list[Tensor]()
    method, accepted = NormAttribution(subject.model), subject.tolerance
    method.maps(inputs)  # the first call also tries the model on other inputs
    with subject.model.register_forward_hook(lambda _, __, output: seen.append(output[0])):
        delta = float(cast(Tensor, method.maps(inputs).convergence_delta).max())
    same = torch.equal(seen[-1], subject.output(subject.length))
    formed = _deviation(subject.maps(), _Formed(subject.model).maps(subject.inputs()[0]))
    figure = f"vectors add up within {delta:.0e}, norms are formed ones' within {formed:.0e} (accepted: {accepted:.0e})"
    what = f"the output is {'' if same else 'NOT '}the plain call's"
    return same and max(delta, formed) <= accepted, f"{figure}, {what}; {described}"


def _fast(subject: Subject) -> tuple[bool, str]:
    plain, norms, threads = list[float](), list[float](), torch.get_num_threads()
    # On a busy machine, threads wait for each other; what one computes takes the same time of the processor.
    torch.set_num_threads(1)
    try:
        for _ in range(5):
            for call, times in ((subject.output, plain), (subject.maps, norms)):
                start = process_time()
                call(subject.length)
                times.append(process_time() - start)
    finally:
        torch.set_num_threads(threads)
    ratio, typical = median(b / a for a, b in zip(plain, norms, strict=True)), median(plain)
    figure = f"norms take {ratio:.1f} × a forward pass of {typical:.2g} s on one thread"
    described = f"(accepted: {_SLOWEST} × + {_OVERHEAD} s); {subject.inputs(subject.length)[1]}"
    return ratio * typical <= _SLOWEST * typical + _OVERHEAD, f"{figure} {described}"


def _untouched(subject: Subject) -> tuple[bool, str]:
    output, state, interrupted = subject.output(), subject.state(), _Formed(subject.model)
    interrupted.interrupted = True
    subject.maps()
    with suppress(KeyboardInterrupt):
        interrupted.maps(subject.inputs()[0])
    held = torch.equal(output, subject.output()) and state == subject.state()
    what = "nothing" if held else "SOMETHING"
    return held, f"a call and an interrupted one change {what} of weights, hooks, attributes, settings and output"


def _safe(_: Subject) -> tuple[bool, str]:
    config = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with TemporaryDirectory() as name:
        ran = Path(name, "ran")
        harmful = type("Harmful", (), {"__reduce__": lambda _: (os.mkdir, (str(ran),))})
        torch.save(harmful(), Path(name, "pytorch_model.bin"))
        Path(name, "config.json").write_text(json.dumps(config), encoding="utf-8")
        with suppress(InvalidInputError):
            load_model(name)
        held = not ran.exists()
    return held, f"weights that make a folder as they are read are {'refused' if held else 'RUN'}"


def _resumable(subject: Subject) -> tuple[bool, str]:
    begun = list[int]()

    def work(block: Block) -> Record:
        begun.append(block.index)
        if begun == [0, 1, 2]:
            raise KeyboardInterrupt
        return Record({}, b"".join(stack.numpy().tobytes() for stack in _stacks(subject.maps(seed=block.index))))

    class Run(Job):
        def blocks(self) -> Iterator[Block]:
            return cut([f"{folder}/text"], 1)

        def worker(self) -> Callable[[Block], Record]:
            return work

        def finish(self, journal: Journal, blocks: int) -> bytes:
            return b"".join(record.content for record in journal.records(blocks))

    with TemporaryDirectory() as folder:
        Path(folder, "text").write_text("line\n" * 4, encoding="utf-8")
        with suppress(KeyboardInterrupt):
            run_job(Run(f"{folder}/norms", {}))
        resumed, more = run_job(Run(f"{folder}/norms", {})), len(begun) - 3
        same = run_job(Run(f"{folder}/norms", {})) == resumed
    what = "the same bytes" if same else "OTHER BYTES"
    return same and more == 2, f"a run interrupted after 2 of 4 blocks computes {more} more, and {what}"


def _deterministic(subject: Subject) -> tuple[bool, str]:
    alone, accepted = subject.maps(), subject.tolerance
    same = all(map(torch.equal, _stacks(alone), _stacks(subject.maps())))
    others = subject.inputs(seed=1)[0]
    batch = {name: torch.cat([tensor, others[name]]) for name, tensor in subject.inputs()[0].items()}
    beside = _deviation(NormAttribution(subject.model).maps(batch), alone)
    figure = f"again {'the same bits' if same else 'OTHER NUMBERS'}, in a batch the same within {beside:.0e}"
    return same and beside <= accepted, f"{figure} (accepted: {accepted:.0e})"


def checked(subject: Subject, console: Terminal) -> dict[str, Any]:
    """Check each promise, print what is found, and return it."""
    found = {}
    for check in (_exact, _fast, _untouched, _safe, _resumable, _deterministic):
        try:
            held, figure = check(subject)
        except CaptumNormError as error:
            held, figure = False, str(error)
        promise = check.__name__[1:]
        found[promise] = {"held": held, "figure": figure}
        console.say(f"  {promise:13} {'holds' if held else 'FAILS'}  {figure}")
    return found
