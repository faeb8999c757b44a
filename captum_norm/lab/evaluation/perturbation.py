"""Runs a model on inputs without some of their tokens, or with changed embeddings."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from captum import metrics
from torch import Tensor

from captum_norm.checks import check_bool, check_choice, check_count, check_index, check_number, quoted
from captum_norm.errors import InvalidInputError, NonFiniteError
from captum_norm.models import (
    Difference,
    Explainable,
    Inputs,
    Position,
    TokenInputs,
    bind_tokens,
    chosen_target,
    explained_number,
    opened,
    replacement,
)
from captum_norm.models.embeddings import Replacement, StandIn
from captum_norm.models.outputs import Readout, Target

Output = Literal["probability", "logit"]
"""The output of a class: its probability, or its logit (or the number that a readout returns)."""

MOST = 10**6
"""The largest number of steps or samples; more would not fit into memory."""


class Perturbation:
    """How tokens are removed, and which output of the model is observed.

    Args:
        model: a classifier or causal language model of Hugging Face, or any other model with ``readout``; not changed.
        removal: how to remove a token: ``"delete"`` deletes it from the sequence; anything else replaces its embedding,
            by that of the ``"mask"`` or ``"pad"`` token, the ``"mean"`` of all tokens' embeddings, ``"zero"``, a
            token's id or an embedding (D,). None: the mask token, or else the padding token, or else the mean.
        tokenizer: tokenizes texts, and knows mask, padding and special tokens; None for that of a pipeline or a
            SentenceTransformer.
        keep_special: never remove nor count special tokens such as [CLS]. Needs the tokenizer.
        output: ``"probability"``, for mutually exclusive classes, or ``"logit"``.
        readout: the output to observe instead of logits, see :data:`captum_norm.models.outputs.Readout`.
        batch_size: the number of perturbed inputs in one forward pass.

    Raises:
        InvalidInputError: an option is invalid, or the replacing token is unknown.
        UnsupportedModelError: the model is an encoder–decoder, or does not name its embedding module.
    """

    def __init__(
        self,
        model: Explainable,
        removal: StandIn | Literal["delete"] | int | Tensor | None = "mask",
        *,
        tokenizer: Any = None,
        keep_special: bool = True,
        output: Output = "probability",
        readout: Readout | None = None,
        batch_size: int = 64,
    ) -> None:
        model, tokenizer = opened(model, tokenizer)
        check_choice("output", output, get_args(Output))
        if output == "probability" and readout is None and has_sigmoids(model):
            raise InvalidInputError(
                f"{type(model).__name__} is a multi-label classifier, whose probability is the sigmoid of one logit, "
                "not a share of all; watch the logit"
            )
        if check_bool("keep_special", keep_special) and tokenizer is None:
            raise InvalidInputError(
                "got keep_special=True without a tokenizer, which knows the special tokens; pass one, or "
                "keep_special=False"
            )
        self.replacement: Replacement | None = None
        if isinstance(removal, str) and removal == "delete":
            replacement(model, "zero", tokenizer)  # refuses models that do not name their embedding module
            if "attention_mask" not in inspect.signature(model.forward).parameters:
                raise InvalidInputError(f"{type(model).__name__} takes no attention mask, so no token can be deleted")
        else:
            self.replacement = replacement(model, removal, tokenizer)
        self.model, self._tokenizer = model, tokenizer
        self.special_ids = tuple(tokenizer.all_special_ids) if keep_special and tokenizer is not None else ()
        self.keep_special = keep_special
        self.output = output
        self.readout = readout
        self.batch_size = check_count("batch_size", batch_size)

    @property
    def signature(self) -> str:
        """All choices that change scores, like a signature of sacrebleu."""
        removal = "delete" if self.replacement is None else self.replacement.name
        return f"removal:{removal}|special:{'kept' if self.keep_special else 'removed'}|output:{self.output}"

    def bind(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        target: Target = None,
        position: Position = None,
    ) -> "PerturbedInputs":
        """Prepare inputs for perturbation, which runs the model on them once.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), a tuple of tensors, or a mapping such as a tokenizer's
                output.
            additional_forward_args: the model's further positional arguments (attention mask first).
            target: the class or next token to observe: an integer, one for each example, or for logits a
                :class:`captum_norm.Difference`. None: the model's prediction for the whole input.
            position: where to read the logits if every position has some; its token is never removed. None: the last
                real position, where a causal model predicts the next token.

        Raises:
            InvalidInputError: the inputs, target or position do not fit the model.
            UnsupportedModelError: the model returns no logits, or does not use its embedding module once.
        """
        if self.output == "probability" and isinstance(target, Difference):
            raise InvalidInputError('got a difference of two outputs, which has no probability; pass output="logit"')
        options: dict[str, Any] = {"tokenizer": self._tokenizer, "position": position, "readout": self.readout}
        return PerturbedInputs(self, bind_tokens(self.model, inputs, additional_forward_args, **options), target)


class PerturbedInputs:
    """Inputs whose tokens can be removed, as :meth:`Perturbation.bind` returns them.

    Positions are those of the user's inputs, with padding on either side. Outputs are log-probabilities or logits,
    depending on the perturbation's ``output``, in single precision or better.

    Attributes:
        removable: True at the tokens that may be removed, (B, S).
        target: the class of each example, (B,), or both classes of a difference, (B, 2); None if the output is one
            number.
        whole: the output for the whole inputs, (B,).
    """

    def __init__(self, perturbation: Perturbation, inputs: TokenInputs, target: Target) -> None:
        # Private positions are those of the model.
        self._perturbation, self._inputs = perturbation, inputs
        removable = inputs.ordinary(perturbation.special_ids)
        self._removable = removable if inputs.read is None else removable & ~inputs.read
        self._stand_in = None if perturbation.replacement is None else perturbation.replacement.vector
        scores = self._run(torch.arange(len(inputs), device=inputs.real.device), inputs.real)
        if perturbation.output == "probability" and (scores.dim() == 1 or scores.shape[1] < 2):
            raise InvalidInputError('the output is one number, which has no probability; pass output="logit"')
        self.target = chosen_target(target, scores)
        self.whole = self._select(scores, self.target)
        self.removable = inputs.to_user(self._removable)

    def outputs(self, kept: Tensor) -> Tensor:
        """Compute the output with some tokens removed; tokens that are not removable stay.

        Duplicate inputs are run once.

        Args:
            kept: True at the tokens to keep, (B, K, S).

        Returns:
            (B, K).

        Raises:
            InvalidInputError: ``kept`` has another shape, or deletion leaves no token.
        """
        batch, length = self.removable.shape
        if kept.dim() != 3 or (kept.shape[0], kept.shape[2]) != (batch, length) or kept.dtype != torch.bool:
            got = f"{kept.dtype} of shape {tuple(kept.shape)}"
            raise InvalidInputError(f"got kept tokens as {got}; expected torch.bool of shape ({batch}, K, {length})")
        kept = self._inputs.to_model(kept.to(self._removable.device).transpose(1, 2)).transpose(1, 2)
        rows = ((kept | ~self._removable[:, None]) & self._inputs.real[:, None]).flatten(0, 1)
        examples = torch.arange(batch, device=rows.device).repeat_interleave(kept.shape[1])
        different, places = torch.cat([examples[:, None], rows.long()], 1).unique(dim=0, return_inverse=True)
        examples, rows = different[:, 0], different[:, 1:].bool()
        scores = self._run(examples, rows, None if self.target is None else self.target[examples])
        return scores[places].reshape(batch, -1).to(self.whole)

    def values(self, outputs: Tensor) -> Tensor:
        """Convert log-probabilities to probabilities; logits stay as they are."""
        return outputs.exp() if self._perturbation.output == "probability" else outputs

    def leave_one_out(self) -> Tensor:
        """Compute the whole output minus that without each token, (B, S); 0 at tokens that are never removed."""
        return self.drops(self.outputs(self.all_but_one()))

    def all_but_one(self) -> Tensor:
        """Return which tokens are kept when each one is removed alone, (B, S, S)."""
        batch, length = self.removable.shape
        return ~torch.eye(length, dtype=torch.bool, device=self.removable.device).expand(batch, -1, -1)

    def drops(self, outputs: Tensor) -> Tensor:
        """Compute leave-one-out scores from the outputs for :meth:`all_but_one`, (B, S)."""
        return (self.whole[:, None] - outputs) * self.removable

    def check(self, scores: object) -> None:
        """Check that scores have a number for each token, (B, S).

        Raises:
            InvalidInputError: they have not.
        """
        if not isinstance(scores, Tensor) or scores.is_nested or scores.is_meta:
            raise InvalidInputError(f"got scores {quoted(scores)}; expected a tensor with their numbers")
        if scores.shape != self.removable.shape:
            expected = tuple(self.removable.shape)
            raise InvalidInputError(f"got scores of shape {tuple(scores.shape)}; expected {expected}")

    def _run(self, examples: Tensor, kept: Tensor, target: Tensor | None = None) -> Tensor:
        """Run examples (N,) with the tokens to keep (N, S): outputs (N,), or without a target scores (N, C) or (N,)."""
        real = self._inputs.real
        # Up to the last token that is real, unless tokens are deleted.
        ends = (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)
        lengths = kept.sum(1) if self._stand_in is None else ends[examples]
        if not lengths.all():
            empty = int(examples[lengths.argmin()])
            advice = "" if self._perturbation.keep_special else "keep special tokens, or "
            raise InvalidInputError(
                f"deletion leaves no token of example {empty}; {advice}choose another removal, such as mean"
            )
        # Batches of similar lengths need little padding.
        order = lengths.argsort(stable=True)
        results = []
        for chunk in order.split(self._perturbation.batch_size):
            scores = self._forward(examples[chunk], kept[chunk], lengths[chunk])
            results.append(scores if target is None else self._select(scores, target[chunk]))
        # A model spread over devices may return outputs on another device than the inputs.
        outputs = torch.cat(results).to(order.device)[order.argsort()]
        if target is not None and not outputs.isfinite().all():
            name = type(self._inputs.model).__name__
            raise NonFiniteError(f"the output of {name} for inputs without some tokens contains NaN or infinity")
        return outputs

    def _forward(self, examples: Tensor, kept: Tensor, lengths: Tensor) -> Tensor:
        stand_in = self._stand_in
        places = torch.arange(int(lengths.max()), device=kept.device).expand(len(examples), -1)
        if stand_in is None:
            first = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, : places.shape[1]]
            inputs = self._inputs.take(examples, first, places < lengths[:, None])
            return inputs.scores(inputs.run())
        inputs = self._inputs.take(examples, places)
        hole = (inputs.real & ~kept[:, : places.shape[1]])[..., None]
        return inputs.scores(inputs.run(lambda embedded: torch.where(hole, stand_in.to(embedded), embedded)))

    def _select(self, scores: Tensor, target: Tensor | None) -> Tensor:
        """Log-probabilities or logits of the targets, (N,)."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if target is not None and self._perturbation.output == "probability":
            scores = scores.log_softmax(1)
        return explained_number(scores, target)


def has_sigmoids(model: Any) -> bool:
    """Whether each class has a probability of its own (multi-label classification)."""
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"


def infidelity(
    bound: PerturbedInputs,
    scores: Tensor,
    *,
    samples: int = 32,
    share: float = 0.5,
    normalize: bool = True,
    seed: int = 0,
) -> Tensor:
    """Squared difference of scores and output drops when random tokens are removed [Yeh et al. 2019].

    E[(β Σ_{i removed} score_i − (f(x) − f(x without them)))²], by :func:`captum.metrics.infidelity` on a vector with 1
    or 0 for each token.

    Args:
        bound: the inputs, from :meth:`Perturbation.bind`.
        scores: (B, S).
        samples: the number of random removals for each example.
        share: the probability of removing each token.
        normalize: choose the β of each example that minimises the infidelity, so the unit of the scores does not
            matter; otherwise β = 1.
        seed: the seed of the removals.

    Returns:
        (B,), in the squared unit of the output; lower is better.

    Raises:
        InvalidInputError: the scores do not have the shape of the inputs, or an option is invalid.
    """
    if not isinstance(bound, PerturbedInputs):
        raise InvalidInputError(f"got {quoted(bound)}; expected what Perturbation.bind returns")
    removable = bound.removable
    bound.check(scores)
    samples, normalize = check_count("samples", samples, MOST), check_bool("normalize", normalize)
    share = check_number("share", share)
    generator = torch.Generator(removable.device).manual_seed(check_index("seed", seed))
    present = removable.to(bound.whole)

    def remove(kept: Tensor) -> tuple[Tensor, Tensor]:
        removed = kept * (torch.rand(kept.shape, generator=generator, device=kept.device) < share)
        return removed, kept - removed

    def forward(kept: Tensor) -> Tensor:
        # Captum repeats each example in place.
        by_example = kept.bool().unflatten(0, (len(removable), -1))
        return bound.values(bound.outputs(by_example)).flatten()

    attributions = scores.detach().to(present)
    result: Tensor = metrics.infidelity(
        forward, remove, present, attributions, n_perturb_samples=samples, normalize=normalize
    )
    return result


def max_sensitivity(
    attribute: Callable[..., Any],
    model: Explainable,
    inputs: Inputs,
    additional_forward_args: Any = None,
    *,
    radius: float = 0.02,
    samples: int = 10,
    seed: int = 0,
    **arguments: Any,
) -> Tensor:
    """Largest relative change of scores under small changes of the embeddings [Yeh et al. 2019].

    max ‖scores(e + ε) − scores(e)‖ / ‖scores(e)‖ over random ε with entries in [−radius, radius], by
    :func:`captum.metrics.sensitivity_max`.

    Args:
        attribute: the method's ``attribute``; called with mappings that hold ``inputs_embeds``.
        model: the model that it explains.
        inputs: see :meth:`Perturbation.bind`.
        additional_forward_args: see :meth:`Perturbation.bind`.
        radius: the radius in the unit of the embeddings.
        samples: the number of random changes for each example.
        seed: the seed of the changes.
        arguments: further arguments of ``attribute``. Pass a ``target`` if the method has one, since its default could
            change with the embeddings.

    Returns:
        (B,); lower is better.

    Raises:
        InvalidInputError: an option is invalid.
    """
    samples, radius = check_count("samples", samples, MOST), check_number("radius", radius)
    model, tokenizer = opened(model)
    bound = bind_tokens(model, inputs, additional_forward_args, tokenizer=tokenizer)
    embeddings, batch = bound.embeddings(), len(bound)
    generator = torch.Generator(embeddings.device).manual_seed(check_index("seed", seed))

    def explain(changed: Tensor | tuple[Tensor, ...], **options: Any) -> tuple[Tensor]:
        (changed,) = changed if isinstance(changed, tuple) else (changed,)
        examples = torch.arange(batch, device=bound.real.device).repeat_interleave(len(changed) // batch)
        places = torch.arange(bound.real.shape[1], device=examples.device).expand(len(examples), -1)
        repeated = bound.take(examples, places).arguments
        further = {name: value for name, value in repeated.items() if name not in ("input_ids", "inputs_embeds")}
        return (attribute({"inputs_embeds": changed, **further}, **options),)

    def change(embedded: Tensor) -> Tensor:
        noise = torch.rand(embedded.shape, generator=generator, device=embedded.device, dtype=embedded.dtype)
        return embedded + radius * (2 * noise - 1)

    result: Tensor = metrics.sensitivity_max(
        explain, embeddings, perturb_func=change, n_perturb_samples=samples, **arguments
    )
    return result
