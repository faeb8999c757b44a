"""Captum's own tools with our methods."""

from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from captum import attr
from captum.log import log_usage
from captum.metrics import infidelity, sensitivity_max
from torch import Tensor

from captum_norm import AttentionBlockAttribution, AttentionWeights, NormAttribution, TokenAttribution
from tests import families
from tests.classifiers import classifier, sentences


def test_noise_tunnel_goes_around_and_functions_make_methods() -> None:
    model, (ids, mask) = classifier(), sentences([7, 7])

    embeddings = model.get_input_embeddings()(ids).detach()
    method = TokenAttribution(model, attr.Saliency)
    explained: list[Tensor] = []

    class Recording(TokenAttribution):
        @log_usage()  # type: ignore[untyped-decorator]
        def attribute(self, *args: Any, **options: Any) -> Any:
            result = super().attribute(*args, **options)
            explained.append(result)
            return result

    smooth = attr.NoiseTunnel(Recording(model, attr.Saliency)).attribute(
        embeddings, nt_type="smoothgrad", nt_samples=4, stdevs=0.1, target=1, additional_forward_args=mask
    )
    torch.testing.assert_close(smooth, torch.cat(explained).unflatten(0, (2, 4)).mean(1))
    difference = (smooth - method.attribute(embeddings, 1, mask)).norm() / smooth.norm()
    assert 1e-3 < difference < 1


def test_captums_metrics_take_the_methods() -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    embeddings = model.get_input_embeddings()(ids).detach()
    method = TokenAttribution(model, attr.InputXGradient)
    scores = method.attribute(embeddings, 1, mask)
    moved = sensitivity_max(method.attribute, embeddings, perturb_radius=0.3, target=1, additional_forward_args=mask)
    assert (moved > 1e-3).all()

    def perturb(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return 0.1 * inputs, 0.9 * inputs

    def logit(embedded: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=embedded, attention_mask=mask).logits[:, 1]
        return logits

    # One number for each token stands for its embedding's share: x · gradient moved along x.
    whole = (embeddings * embeddings).sum(-1, keepdim=True)
    captums = infidelity(
        logit, perturb, embeddings, scores[..., None] * embeddings / whole, additional_forward_args=mask
    )
    expected = 0.1 * scores.sum(1) - (logit(embeddings, mask) - logit(0.9 * embeddings, mask)).detach()
    assert mask.bool().all(1).any()
    torch.testing.assert_close(captums[0], expected[0].square())


@pytest.mark.parametrize("kind", [NormAttribution, AttentionBlockAttribution, AttentionWeights])
def test_methods_of_maps_are_captums(kind: Any) -> None:
    model, ids = families.build("bert"), families.inputs("bert", batch=2)
    embeddings, method = model.get_input_embeddings()(ids).detach(), kind(model)
    more: dict[str, Any] = {"additional_forward_args": torch.ones_like(ids)}
    assert isinstance(method, attr.Attribution)
    smooth = attr.NoiseTunnel(method).attribute(embeddings, nt_samples=3, nt_type="smoothgrad", stdevs=0.0, **more)
    torch.testing.assert_close(smooth, method.attribute(embeddings, **more))
    assert sensitivity_max(method.attribute, embeddings, perturb_radius=0.0, **more).abs().max() < 1e-5
    assert (sensitivity_max(method.attribute, embeddings, perturb_radius=0.5, **more) > 1e-4).all()


@pytest.mark.parametrize("make", [NormAttribution, lambda model: TokenAttribution(model, attr.FeatureAblation)])
def test_generated_text_is_explained_and_plotted(make: Any) -> None:
    method = make(families.build("gpt2", dtype=torch.float64))
    whole = torch.tensor([[11, 42, 5, 33, 7, 20]])
    start, end = 3, whole.shape[1]
    lengths = torch.arange(start, end)
    prefixes = whole[:, : end - 1].repeat(len(lengths), 1)
    real = (torch.arange(end - 1) < lengths[:, None]).long()
    rows = method.attribute(prefixes, whole[0, start:], real)
    for row, length in enumerate(lengths.tolist()):
        alone = method.attribute(whole[:, :length], int(whole[0, length]))
        torch.testing.assert_close(rows[row : row + 1, :length], alone, rtol=1e-9, atol=1e-12)
        assert not rows[row, length:].any()
    names = [str(token) for token in whole[0].tolist()]
    result = attr.LLMAttributionResult(
        input_tokens=names[: end - 1], output_tokens=names[start:], seq_attr=rows.sum(0), token_attr=rows
    )
    plots: list[Any] = [result.plot_token_attr(show=False), result.plot_seq_attr(show=False)]
    (heatmap, tokens), (bars, sequence) = plots
    torch.testing.assert_close(torch.as_tensor(tokens.images[0].get_array()), rows)
    assert [label.get_text() for label in tokens.get_yticklabels()] == names[start:]
    # Captum draws positive bars first, then negative ones.
    heights = torch.tensor([bar.get_height() for bar in sequence.patches], dtype=torch.float64)
    torch.testing.assert_close(heights.unflatten(0, (2, -1)).sum(0), rows.sum(0))
    for figure in (heatmap, bars):
        plt.close(figure)
