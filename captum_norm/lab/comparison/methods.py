"""Creates methods by name, runs them from a seed, and chooses the number that they explain."""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr.tokens import TokenAttribution
from captum_norm.checks import check_index, did_you_mean
from captum_norm.errors import InvalidInputError, NonFiniteError, UnsupportedModelError
from captum_norm.methods import METHODS
from captum_norm.models import Difference, Inputs, TokenInputs, bind_tokens, explained_module
from captum_norm.models.embeddings import StandIn
from captum_norm.models.outputs import Readout, Target

PROJECTION = "projection of the mean-pooled output on its own direction (the model has no head)"
"""The explained output of a model that only returns hidden states."""

_SEEDS = 2**32


class RandomScores(Attribution):
    """Random scores from torch's global generator, as a baseline."""

    unit = "random number"

    def __init__(self, model: nn.Module) -> None:
        self.model = explained_module(model)
        super().__init__(self.model)

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,  # noqa: ARG002
        additional_forward_args: Any = None,
        *,
        position: Any = None,  # noqa: ARG002
    ) -> Tensor:
        """Draw scores uniformly from 0 to 1 at real positions, (B, S)."""
        bound = bind_tokens(self.model, inputs, additional_forward_args)
        return bound.to_user(torch.rand(bound.real.shape, device=bound.real.device) * bound.real)


def make_method(
    name: str,
    model: nn.Module,
    *,
    removal: StandIn | Literal["delete"] | int | Tensor | None = None,
    tokenizer: Any = None,
    keep_special: bool = True,
    readout: Readout | None = None,
    batch_size: int = 32,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Attribution:
    """Create a method of :data:`captum_norm.methods.METHODS` for a model."""
    method = METHODS[name]
    if method.requires is not None and find_spec(method.requires) is None:
        raise InvalidInputError(f"{name} needs scikit-learn, which is not installed: pip install scikit-learn")
    kind = method.load()
    if method.package == "captum.attr":
        return TokenAttribution(
            model,
            kind,
            baseline=None if isinstance(removal, str) and removal == "delete" else removal,
            tokenizer=tokenizer,
            keep_special=keep_special,
            readout=readout,
            batch_size=batch_size,
            **{**method.options, **options},
        )
    made: Attribution = kind(model, **({} if method.target == "never" else {"readout": readout}), **options)
    return made


def check_methods(methods: Sequence[str] | Mapping[str, str | Attribution] | None) -> dict[str, str | Attribution]:
    """Return the methods to compare, or their names, by their names in the results."""
    if methods is None:
        methods = tuple(METHODS)
    if not isinstance(methods, Mapping):
        if isinstance(methods, str) or any(isinstance(method, Attribution) for method in methods):
            raise InvalidInputError(
                f'got methods={methods!r}; expected a list of names, or a mapping: methods={{"mine": ...}}'
            )
        methods = dict(zip(methods, methods, strict=True))
    if not methods:
        raise InvalidInputError(f"got no methods; expected some of {', '.join(METHODS)}")
    for method in methods.values():
        if not isinstance(method, Attribution) and method not in METHODS:
            raise InvalidInputError(
                f"got the method {method!r}; expected a method of Captum or one of {', '.join(METHODS)}"
                f"{did_you_mean(method, METHODS)}"
            )
    return dict(methods)


def signature_of(method: Attribution) -> str:
    """Format the class of a method and its choices, like a signature of sacrebleu."""
    signature: str | None = getattr(method, "signature", None)
    if signature is not None:
        return signature
    choices = ((name, getattr(method, name, None)) for name in inspect.signature(type(method)).parameters)
    shown = {name: value for name, value in choices if isinstance(value, (str, int, float))}
    return "|".join([f"attribution:{type(method).__name__}", *(f"{name}:{value}" for name, value in shown.items())])


def check_seed(seed: int) -> int:
    """Convert a seed for torch and numpy."""
    number = check_index("the seed", seed)
    if not 0 <= number < _SEEDS:
        raise InvalidInputError(f"got the seed {number}; expected 0 to {_SEEDS - 1}")
    return number


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's and numpy's global generators, of the model's devices too, then restore them; Captum is silent."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # Captum's GradientSHAP draws from numpy's global generator.
    state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=sorted(devices, key=str)), warnings.catch_warnings():
        # Captum's DeepLIFT warns at every call that it sets hooks.
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


@dataclass(frozen=True, eq=False)
class Batch:
    """Some of the examples, without padding that is common to all of them."""

    index: Tensor
    inputs: TokenInputs
    target: Target

    @property
    def position(self) -> Tensor | None:
        """Where the output is read, (N,); None for the default."""
        return None if self.inputs.read is None else self.inputs.read.long().argmax(1)


def batches_of(inputs: TokenInputs, target: Target, size: int) -> Iterator[Batch]:
    """Batch examples of similar lengths, which need little padding."""
    lengths = inputs.real.sum(1)
    for index in lengths.argsort(stable=True).split(size):
        places = torch.arange(int(lengths[index].max()), device=index.device).expand(len(index), -1)
        yield Batch(index, inputs.take(index, places), target_of_some(target, index, len(inputs)))


def target_of_some(target: Target, index: Tensor, batch: int) -> Target:
    """Return the targets of some of B examples; invalid ones are refused where they are used."""
    if isinstance(target, Difference):
        parts: list[Any] = [target_of_some(part, index, batch) for part in (target.target, target.other)]
        return Difference(*parts)
    listed = isinstance(target, Sequence) or (isinstance(target, Tensor) and target.dim() > 0)
    if not listed or len(target) != batch:  # type: ignore[arg-type]
        return target
    return torch.as_tensor(target)[index.cpu()]


def in_order(parts: Sequence[Tensor], batches: Sequence[Batch], width: int | None = None) -> Tensor:
    """Concatenate rows of batches in the order of all examples, padded with zeros to (B, width) if given."""
    if width is not None:
        parts = [nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    rows, order = torch.cat(list(parts)), torch.cat([batch.index for batch in batches])
    return rows[order.argsort().to(rows.device)]


def token_scores(method: Attribution, batch: Batch, seed: int, *, mean: bool) -> Tensor:
    """Compute a method's scores for the tokens of a batch, (N, S), with the global generators seeded."""
    where: dict[str, Any] = {} if batch.position is None else {"position": batch.position}
    if mean and hasattr(method, "maps"):
        where = {"position": "mean"}
    with seeded(batch.inputs.model, seed):
        result = method.attribute(batch.inputs.arguments, target=batch.target, **where)
    scores: Any = result[0] if isinstance(result, tuple) else result
    real = batch.inputs.real
    if not isinstance(scores, Tensor) or scores.shape != real.shape:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InvalidInputError(
            f"{type(method).__name__} gives {got}; expected a score for each token, {tuple(real.shape)}"
        )
    scores = scores.detach().to(real.device, torch.promote_types(scores.dtype, torch.float32))
    if not scores[real].isfinite().all():
        raise NonFiniteError(f"{type(method).__name__} gives NaN or infinity for these inputs")
    masked: Tensor = scores.masked_fill(~real, 0)
    return masked


def count_outputs(inputs: TokenInputs) -> int | None:
    """Count the logits, at each position if every position has some; None if the model only returns hidden states."""
    output = next(batches_of(inputs, None, 1)).inputs.run()
    named = output if isinstance(output, Mapping) else {"logits": output}
    logits = named.get("logits")
    if isinstance(logits, Tensor):
        return logits.shape[-1] if logits.dim() > 1 else 1
    if "last_hidden_state" not in named:
        raise UnsupportedModelError(
            f"{type(inputs.model).__name__} returns neither logits nor a last hidden state; take a classifier, a "
            "tagger, a language model or an encoder without a head, or in Python pass a readout"
        )
    return None


def own_directions(inputs: TokenInputs, size: int) -> Readout:
    """Create a readout for models without a head."""
    batches = list(batches_of(inputs, None, size))
    parts = [_pooled(batch.inputs.run(), batch.inputs.real) for batch in batches]
    directions = nn.functional.normalize(in_order(parts, batches), dim=-1)

    def project(output: Any, real: Tensor) -> Tensor:
        pooled = _pooled(output, real)
        return pooled @ directions.to(pooled).T

    return project


def _pooled(output: Any, real: Tensor) -> Tensor:
    """The mean hidden state of the real positions, (N, D)."""
    states: Tensor = output["last_hidden_state"]
    weights = real.to(states)
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
