"""Applies Captum's own metrics, infidelity and maximum sensitivity, to token scores."""

from collections.abc import Callable
from typing import Any

import torch
from captum import metrics
from torch import Tensor

from captum_norm.checks import as_count, as_index, as_number, as_truth, shown
from captum_norm.errors import InvalidInputError
from captum_norm.lab.evaluation.perturbation import PerturbedInputs
from captum_norm.lab.evaluation.scores import MOST, check_scores
from captum_norm.models.embeddings import run_embedded
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.objects import Explainable, opened


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
        raise InvalidInputError(f"got {shown(bound)}; expected what Perturbation.bind returns")
    removable = bound.removable
    check_scores(scores, removable)
    samples, normalize = as_count("samples", samples, MOST), as_truth("normalize", normalize)
    share = as_number("share", share)
    generator = torch.Generator(removable.device).manual_seed(as_index("seed", seed))
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
    samples, radius = as_count("samples", samples, MOST), as_number("radius", radius)
    model, tokenizer = opened(model)
    call = bind_inputs(model, inputs, additional_forward_args, tokenizer=tokenizer)
    with torch.no_grad(), evaluating(model):
        _, embeddings = run_embedded(call)
    generator = torch.Generator(embeddings.device).manual_seed(as_index("seed", seed))

    def explain(changed: Tensor | tuple[Tensor, ...], **options: Any) -> tuple[Tensor]:
        (changed,) = changed if isinstance(changed, tuple) else (changed,)
        times = len(changed) // call.batch
        examples = [example for example in range(call.batch) for _ in range(times)]
        repeated = call.map_batched(lambda value: value.repeat_interleave(times, 0), examples)
        further = {name: value for name, value in repeated.passed.items() if name not in ("input_ids", "inputs_embeds")}
        return (attribute({"inputs_embeds": changed, **further}, **options),)

    def change(embedded: Tensor) -> Tensor:
        noise = torch.rand(embedded.shape, generator=generator, device=embedded.device, dtype=embedded.dtype)
        return embedded + radius * (2 * noise - 1)

    result: Tensor = metrics.sensitivity_max(
        explain, embeddings, perturb_func=change, n_perturb_samples=samples, **arguments
    )
    return result
