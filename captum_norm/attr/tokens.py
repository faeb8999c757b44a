"""Turns Captum's gradient and perturbation methods into token attributions."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from captum.attr import Attribution, DeepLiftShap, GradientShap, PerturbationAttribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr.layer_maps import finite_results
from captum_norm.checks import check_bool, check_choice, check_count, did_you_mean, quoted
from captum_norm.errors import CaptumNormError, InvalidInputError, NonFiniteError
from captum_norm.forward.gradients import gradients_through
from captum_norm.functional import length
from captum_norm.models import outputs
from captum_norm.models.call import ModelCall
from captum_norm.models.embeddings import (
    StandIn,
    embedding_module,
    ordinary_positions,
    replacement,
    run_embedded,
    run_with_embeddings,
)
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.objects import Explainable, opened
from captum_norm.models.wrappers import class_of

Reduction = Literal["l2", "sum"]
"""How a token's D numbers are reduced to one: by their Euclidean norm, or their sum."""

# Arguments of a method's ``attribute`` that are not options: those of ours, and ``baseline=``.
_RESERVED = frozenset({"inputs", "target", "additional_forward_args", "return_convergence_delta", "baselines"})


class TokenAttribution(Attribution):
    """Any gradient or perturbation method of Captum, with one score for each token.

    Gradient methods explain the embeddings of the tokens, whose D numbers are then reduced to one. Perturbation methods
    explain one number for each token: 1 keeps its embedding, 0 replaces it by the baseline. In both cases the output of
    the embedding module is replaced; ids, position and type embeddings stay the same.

    Methods that draw random numbers use torch's global generator, Captum's GradientSHAP also numpy's.

    Args:
        model: a classifier or causal language model of Hugging Face, or any other model with ``readout``; not changed.
        method: creates the method from a module: a class such as :class:`captum.attr.IntegratedGradients`, or a
            function, ``lambda module: IntegratedGradients(module, multiply_by_inputs=False)``.
        baseline: the baseline of a token, for methods that have one: ``"mask"``, ``"pad"``, ``"zero"``, ``"mean"`` (of
            all tokens' embeddings), a token's id or an embedding (D,). None: the mask token, or else the padding token,
            or else the mean. It is part of :attr:`signature`.
        tokenizer: tokenizes texts, and knows mask, padding and special tokens; None for that of a pipeline or a
            SentenceTransformer; otherwise the mask and padding tokens are found in the model's configuration.
        keep_special: keep special tokens such as [CLS] in the baseline; with a baseline they then score exactly 0.
            Needs the tokenizer.
        reduction: for gradient methods, ``"l2"`` or ``"sum"``. None: the sum if the method multiplies by the inputs,
            which gives signed scores that add up, else the norm.
        readout: the output to explain instead of logits, see :data:`captum_norm.models.outputs.Readout`.
        batch_size: the number of perturbed or interpolated inputs in one forward pass; integrated gradients need at
            least one for each example.
        options: further arguments of the method's ``attribute``, such as ``n_steps=20``.

    Attributes:
        baseline: the baseline's name and current embedding; None if the method has none.

    Raises:
        InvalidInputError: an option is invalid, or a perturbation method takes no baseline.
        UnsupportedModelError: the model is an encoder–decoder, or does not name its embedding module.

    Example:
        >>> import torch
        >>> from captum.attr import IntegratedGradients
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
        >>> method = TokenAttribution(model, IntegratedGradients, n_steps=20)
        >>> method.signature
        'attribution:IntegratedGradients|n_steps:20|baseline:pad:0|special:replaced|reduction:sum'
        >>> method.attribute(torch.tensor([[2, 7, 9, 3]]), target=1).shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        model: Explainable,
        method: Callable[[nn.Module], Attribution],
        /,
        *,
        baseline: StandIn | int | Tensor | None = None,
        tokenizer: Any = None,
        keep_special: bool = False,
        reduction: Reduction | None = None,
        readout: outputs.Readout | None = None,
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        if not callable(method):
            raise InvalidInputError(f"got the method {quoted(method)}; expected a class of Captum, such as Saliency")
        model, tokenizer = opened(model, tokenizer)
        if reduction is not None:
            check_choice("reduction", reduction, get_args(Reduction))
        if check_bool("keep_special", keep_special) and tokenizer is None:
            raise InvalidInputError(
                "got keep_special=True without a tokenizer, which knows the special tokens; pass tokenizer="
            )
        embedding_module(model)
        super().__init__(model)
        self.model, self._tokenizer = model, tokenizer
        self._make = method
        probe = method(model)
        parameters = inspect.signature(probe.attribute).parameters
        known = sorted(parameters.keys() - _RESERVED)
        for option in sorted(options.keys() - set(known)):
            has = f"; it has {', '.join(known)}{did_you_mean(option, known)}" if known else ""
            raise InvalidInputError(f"{type(probe).__name__}.attribute has no further argument {option!r}{has}")
        self._name = type(probe).__name__
        self._perturbs = isinstance(probe, PerturbationAttribution)
        # These use the baselines of the whole batch, so each example is explained alone.
        self._one_by_one = isinstance(probe, (PerturbationAttribution, GradientShap, DeepLiftShap))
        # DeepLiftShap refuses a single baseline.
        self._repeats = 2 if isinstance(probe, DeepLiftShap) else 1
        self._parameters = frozenset(parameters)
        if self._perturbs and "baselines" not in parameters:
            raise InvalidInputError(f"{self._name} takes no baseline, so it cannot leave a token out")
        self._options = options
        self._special = tuple(tokenizer.all_special_ids) if keep_special and tokenizer is not None else ()
        self.keep_special = keep_special
        self.baseline = replacement(model, baseline, tokenizer) if "baselines" in parameters else None
        self.reduction = reduction or ("sum" if not self._perturbs and probe.multiplies_by_inputs else "l2")
        self.readout = readout
        self._batch_size = check_count("batch_size", batch_size)

    def __repr__(self) -> str:
        return f"TokenAttribution({class_of(self.model).__name__}, {self.signature!r})"

    @property
    def signature(self) -> str:
        """The method and all choices that change its scores, like a signature of sacrebleu."""
        entries = {"attribution": self._name} | {name: str(value) for name, value in self._options.items()}
        if self.baseline is not None:
            entries |= {"baseline": self.baseline.name, "special": "kept" if self.keep_special else "replaced"}
        if not self._perturbs:
            entries["reduction"] = self.reduction
        return "|".join(f"{name}:{value}" for name, value in entries.items())

    @property
    def unit(self) -> str:
        """What the scores are."""
        return "part of the output" if self._perturbs or self.reduction == "sum" else "norm of the gradient"

    def has_convergence_delta(self) -> bool:
        """Whether the method's attributions add up to a difference of outputs."""
        return "return_convergence_delta" in self._parameters

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Inputs,
        target: outputs.Target = None,
        additional_forward_args: Any = None,
        *,
        position: outputs.Position = None,
        return_convergence_delta: bool = False,
    ) -> Any:
        """Attribute one output to the input tokens.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), a tuple of tensors, or a mapping such as a tokenizer's
                output. Embeddings go into the model as ``inputs_embeds``.
            target: the class or next token to explain: an integer, one for each example, or a
                :class:`captum_norm.Difference`. None: the model's prediction.
            additional_forward_args: the model's further positional arguments (attention mask first).
            position: where to read the logits if every position has some: an index (negative from the end), one for
                each example, ``"first"`` or ``"last"``. None: the last real position, where a causal model predicts the
                next token.
            return_convergence_delta: also return Σ attributions − (output − output at the baseline), (B,), signed, in
                the unit of the output, before any reduction; averaged if the method draws several baselines.

        Returns:
            (B, S), exactly 0 at padding; a tuple of this one tensor if ``inputs`` is a tuple.

        Raises:
            InvalidInputError: the inputs, target or position do not fit the model, or the method has no convergence
                delta.
            NonFiniteError: a score or convergence delta is NaN or infinite.
            UnsupportedModelError: the model returns no logits, or does not use its embedding module once.
        """
        if check_bool("return_convergence_delta", return_convergence_delta) and not self.has_convergence_delta():
            raise InvalidInputError(f"{self._name} has no convergence delta; leave return_convergence_delta out")
        with evaluating(self.model), torch.inference_mode(False):
            call = bind_inputs(self.model, inputs, additional_forward_args, tokenizer=self._tokenizer)
            call = call.outside_inference()
            real, read = outputs.real_positions(call), outputs.read_mask(call, position)
            with torch.no_grad():
                output, embeddings = run_embedded(call)
            call.note(output)
            target = outputs.chosen_target(target, outputs.read_output(self.model, output, real, read, self.readout))
            replaced = ordinary_positions(call, real, self._special)
            vector = None if self.baseline is None else self.baseline.vector
            output_of = _ExplainedOutput(call, real, read, target, self.readout, vector if self._perturbs else None)
            parts = [(output_of, embeddings, replaced)]
            if self._one_by_one:
                ends = enumerate(int(row.nonzero().max()) + 1 for row in real)
                parts = [
                    (output_of.example(n, end), embeddings[n, None, :end], replaced[n, None, :end]) for n, end in ends
                ]
            explained = [self._explain(*part, vector, delta=return_convergence_delta) for part in parts]
        scores = torch.cat([nn.functional.pad(part, (0, real.shape[1] - part.shape[1])) for part, _ in explained])
        if not scores[real].isfinite().all():
            raise NonFiniteError(f"{self._name} of {type(self.model).__name__} gives NaN or infinity for these inputs")
        scores = call.positions.shift_back(scores.masked_fill(~real, 0), 1)
        attributions = (scores,) if isinstance(inputs, tuple) else scores
        if not return_convergence_delta:
            return attributions
        deltas = [delta for _, delta in explained if delta is not None]
        return attributions, finite_results(self.model, torch.cat(deltas))

    def _explain(
        self,
        output_of: "_ExplainedOutput",
        embeddings: Tensor,
        replaced: Tensor,
        baseline: Tensor | None,
        *,
        delta: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the method: scores (N, S) and convergence deltas (N,)."""
        if self._perturbs and not replaced.any():
            return torch.zeros_like(replaced, dtype=torch.float32), None
        # In Captum these are slow by default, or do not treat tokens as features.
        defaults: dict[str, Any] = {
            "perturbations_per_eval": self._batch_size,
            "internal_batch_size": max(self._batch_size, len(replaced)),
            # Tokens that stay share a feature with one that does not.
            "feature_mask": (replaced.long().cumsum(1) - 1).clamp(min=0),
            "sliding_window_shapes": (1,),
        }
        options = {name: value for name, value in defaults.items() if name in self._parameters} | self._options
        if self._perturbs:
            options["baselines"] = (~replaced).to(embeddings)
            features = torch.ones_like(options["baselines"])
        else:
            features = embeddings.clone().requires_grad_()
            if baseline is not None:
                baselines = torch.where(replaced[..., None], baseline.to(embeddings), embeddings)
                options["baselines"] = baselines.repeat(self._repeats, 1, 1)
        if delta:
            options["return_convergence_delta"] = True
        try:
            with torch.set_grad_enabled(not self._perturbs), gradients_through(self.model):
                method = self._make(output_of)
                examples = torch.arange(len(features), device=features.device)
                result = method.attribute(features, additional_forward_args=(examples,), **options)
        except (CaptumNormError, torch.OutOfMemoryError):
            raise
        # RuntimeError: torch.compile disables the checks of torch.distributions.
        except (AssertionError, ValueError, RuntimeError) as refusal:
            reason = str(refusal).partition("\n")[0]
            raise InvalidInputError(f"{self._name} of Captum does not take these inputs: {reason}") from refusal
        attributions, error = result if delta else (result, None)
        attributions = attributions.detach().to(torch.promote_types(attributions.dtype, torch.float32))
        if self._perturbs:
            scores = attributions * replaced
        else:
            scores = attributions.sum(-1) if self.reduction == "sum" else length(attributions)
        return scores, None if error is None else error.detach().reshape(len(replaced), -1).mean(1)


class _ExplainedOutput(nn.Module):
    """The function that Captum explains: from features of examples and their indices to the explained output, (N,)."""

    def __init__(
        self,
        call: ModelCall,
        real: Tensor,  # True at real positions, (B, S)
        read: Tensor | None,  # True where the output is read, (B, S)
        target: Tensor | None,
        readout: outputs.Readout | None,
        # (D,), with which features are (N, S) and interpolate between it and the embeddings; else they are (N, S, D).
        baseline: Tensor | None,
    ) -> None:
        super().__init__()
        self.model, self._call, self.readout, self._baseline = call.model, call, readout, baseline
        self._real, self._read, self._target = real, read, target

    def example(self, index: int, end: int) -> "_ExplainedOutput":
        """Select an example, without what comes from a position on."""
        call = self._call.examples(torch.tensor([index], device="cpu"), end)
        read = None if self._read is None else self._read[index, None, :end]
        target = None if self._target is None else self._target[index, None]
        return _ExplainedOutput(call, self._real[index, None, :end], read, target, self.readout, self._baseline)

    def forward(self, features: Tensor, examples: Tensor) -> Tensor:
        """Compute the explained output of examples, which Captum repeats."""

        def chosen(rows: Tensor) -> Tensor:
            return rows[examples.to(rows.device)]

        def embed(original: Tensor) -> Tensor:
            if self._baseline is None:
                return features
            share = features[..., None].to(original)
            return share * original + (1 - share) * self._baseline.to(original)

        output = run_with_embeddings(self._call.map_batched(chosen, examples.tolist()), embed)
        read, target = (None if rows is None else chosen(rows) for rows in (self._read, self._target))
        return outputs.explained_number(
            outputs.read_output(self.model, output, chosen(self._real), read, self.readout), target
        )
