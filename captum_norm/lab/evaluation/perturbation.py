"""Runs a model on inputs without some of their tokens, in batches across examples and perturbations."""

import inspect
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from captum_norm.checks import as_count, as_truth, one_of
from captum_norm.errors import InvalidInputError, NonFiniteError
from captum_norm.models.call import ModelCall
from captum_norm.models.embeddings import (
    Replacement,
    StandIn,
    embedding_module,
    ordinary_positions,
    replacement,
    run_with_embeddings,
)
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.libraries.registry import library_of
from captum_norm.models.objects import Explainable, opened
from captum_norm.models.outputs import (
    Difference,
    Position,
    Readout,
    Target,
    chosen_target,
    explained_number,
    has_sigmoids,
    read_mask,
    read_output,
    real_positions,
)
from captum_norm.models.wrappers import config_of, unwrapped

Output = Literal["probability", "logit"]
"""The output of a class: its probability, or its logit (or the number that a readout returns)."""


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
        one_of("output", output, get_args(Output))
        if output == "probability" and readout is None and has_sigmoids(model):
            raise InvalidInputError(
                f"{type(model).__name__} is a multi-label classifier, whose probability is the sigmoid of one logit, "
                "not a share of all; watch the logit"
            )
        if as_truth("keep_special", keep_special) and tokenizer is None:
            raise InvalidInputError(
                "got keep_special=True without a tokenizer, which knows the special tokens; pass one, or "
                "keep_special=False"
            )
        embedding_module(model)
        self.model, self._tokenizer = model, tokenizer
        self.replacement: Replacement | None = None
        if isinstance(removal, str) and removal == "delete":
            mask = library_of(model).mask
            if mask not in inspect.signature(unwrapped(model).forward).parameters:
                raise InvalidInputError(f"{type(model).__name__} takes no attention mask, so no token can be deleted")
        else:
            self.replacement = replacement(model, removal, tokenizer)
        self.special_ids = tuple(tokenizer.all_special_ids) if keep_special and tokenizer is not None else ()
        self.keep_special = keep_special
        self.output = output
        self.readout = readout
        self.batch_size = as_count("batch_size", batch_size)

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
        call = bind_inputs(self.model, inputs, additional_forward_args, tokenizer=self._tokenizer)
        return PerturbedInputs(self, call, target, position)


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

    def __init__(self, perturbation: Perturbation, call: ModelCall, target: Target, position: Position) -> None:
        # Private positions are those of the model.
        self._perturbation, self._call = perturbation, call
        self._real, self._read = real_positions(call), read_mask(call, position)
        removable = ordinary_positions(call, self._real, perturbation.special_ids)
        self._removable = removable if self._read is None else removable & ~self._read
        self._stand_in = None if perturbation.replacement is None else perturbation.replacement.vector
        scores = self._run(torch.arange(call.batch, device=self._real.device), self._real)
        if perturbation.output == "probability" and (scores.dim() == 1 or scores.shape[1] < 2):
            raise InvalidInputError('the output is one number, which has no probability; pass output="logit"')
        self.target = chosen_target(target, scores)
        self.whole = _select(scores, self.target, perturbation.output)
        self.removable = call.positions.shift_back(self._removable, 1)

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
        kept = self._call.positions.shift_left(kept.to(self._removable.device).transpose(1, 2)).transpose(1, 2)
        rows = ((kept | ~self._removable[:, None]) & self._real[:, None]).flatten(0, 1)
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

    def _run(self, examples: Tensor, kept: Tensor, target: Tensor | None = None) -> Tensor:
        """Run examples (N,) with the tokens to keep (N, S).

        Returns:
            the output of the target, (N,); without one, what :func:`read_output` returns.
        """
        deleting = self._stand_in is None
        lengths = kept.sum(1) if deleting else _ends(self._real)[examples]
        if not lengths.all():
            empty = int(examples[lengths.argmin()])
            advice = "" if self._perturbation.keep_special else "keep special tokens, or "
            raise InvalidInputError(
                f"deletion leaves no token of example {empty}; {advice}choose another removal, such as mean"
            )
        # Batches of similar lengths need little padding.
        order = lengths.argsort(stable=True)
        results = []
        with torch.no_grad(), evaluating(self._call.model):
            for chunk in order.split(self._perturbation.batch_size):
                scores = self._forward(examples[chunk], kept[chunk], lengths[chunk])
                chosen = None if target is None else target[chunk]
                results.append(scores if chosen is None else _select(scores, chosen, self._perturbation.output))
        # A model spread over devices may return outputs on another device than the inputs.
        outputs = torch.cat(results).to(order.device)[order.argsort()]
        if target is not None and not outputs.isfinite().all():
            name = type(self._call.model).__name__
            raise NonFiniteError(f"the output of {name} for inputs without some tokens contains NaN or infinity")
        return outputs

    def _forward(self, examples: Tensor, kept: Tensor, lengths: Tensor) -> Tensor:
        stand_in = self._stand_in
        ahead = torch.arange(int(lengths.max()), device=kept.device).expand(len(examples), -1)
        if stand_in is None:
            places = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, : ahead.shape[1]]
            real = ahead < lengths[:, None]
        else:
            places, real = ahead, self._real[examples[:, None], ahead]

        def take(value: Tensor) -> Tensor:
            index = examples.to(value.device)
            sequence = value.dim() > 1 and value.shape[1] == self._real.shape[1]
            return value[index[:, None], places.to(value.device)] if sequence else value[index]

        call = self._call.map_batched(take, examples.tolist())
        if stand_in is None:
            _pad(call, real)
            output = call.run()
        else:
            hole = real & ~kept[:, : ahead.shape[1]]
            output = run_with_embeddings(
                call, lambda embedded: torch.where(hole[..., None], stand_in.to(embedded), embedded)
            )
        read = None if self._read is None else take(self._read)
        return read_output(call.model, output, real, read, self._perturbation.readout)


def _pad(call: ModelCall, real: Tensor) -> None:
    """Turn positions that are not real, (N, S), into padding."""
    call.arguments[str(call.library.mask)] = real.long()
    ids, padding = call.arguments.get("input_ids"), getattr(config_of(call.model), "pad_token_id", None)
    # Some classifiers find the last token by the padding id, not by the mask.
    if ids is not None and padding is not None:
        call.arguments["input_ids"] = ids.masked_fill(~real, padding)


def _ends(real: Tensor) -> Tensor:
    """The end of the last real position of each example: (N, S) -> (N,)."""
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)


def _select(scores: Tensor, target: Tensor | None, output: Output) -> Tensor:
    """Log-probabilities or logits of the targets, (N,): see :func:`captum_norm.models.outputs.explained_number`."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if target is not None and output == "probability":
        scores = scores.log_softmax(1)
    return explained_number(scores, target)
