"""fairseq's seam: on models of fairseq itself, and on a stand-in for what those at hand do not show."""

import math
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import AttentionWeights, NormAttribution
from captum_norm.errors import NonFiniteError
from tests import oracle

ROOT = Path(__file__).parents[3]
PAD, WIDTH, HEADS = 1, 16, 4


def test_models_of_fairseq(fairseq_python: Path) -> None:
    """All of ``tests/fairseq_models/checks.py``, where fairseq can be imported."""
    question = "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_python_version())"
    answer = subprocess.run([str(fairseq_python), "-c", question], capture_output=True, text=True, check=True)
    packages, version = answer.stdout.split()
    assert version == sysconfig.get_python_version(), "fairseq's environment must have the same Python as this one"
    command = [sys.executable, "-m", "tests.fairseq_models", packages]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


class Attention(nn.Module):
    """The structure of fairseq's, whose projections are not called as modules either."""

    encoder_decoder_attention = False

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scaling = HEADS, WIDTH // HEADS, (WIDTH // HEADS) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: Any = None,  # noqa: ARG002
        need_weights: bool = True,  # noqa: ARG002
        static_kv: bool = False,  # noqa: ARG002
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,  # noqa: ARG002
        need_head_weights: bool = False,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        weights = self.weights(query, key, key_padding_mask, attn_mask)
        context = (weights @ self.heads(self.v_proj, value)).permute(2, 0, 1, 3).flatten(2)
        output: Tensor = self.out_proj.forward(context)
        return output, weights

    def weights(self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
        scores = self.heads(self.q_proj, query) @ self.heads(self.k_proj, key).transpose(-1, -2) * self.scaling
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -math.inf)
        weights: Tensor = scores.softmax(-1)
        return weights

    @staticmethod
    def heads(projection: nn.Linear, sequence: Tensor) -> Tensor:
        projected: Tensor = projection.forward(sequence).unflatten(-1, (HEADS, -1))
        return projected.permute(1, 2, 0, 3)


class Layer(nn.Module):
    """Post-norm, over (S, B, D); like those of fairseq 0.12.2 it may run as one fused operation."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.can_use_fastpath = 1
        self.options: dict[str, Any] = {}

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        attend = partial(Attention.forward, self.self_attn) if self.can_use_fastpath else self.self_attn
        update, _ = attend(hidden, hidden, hidden, padding, **self.options)
        normed: Tensor = self.norm(hidden + update)
        return normed


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(20, WIDTH, PAD)
        self.layer = Layer()

    def forward(self, src_tokens: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.embed_tokens(src_tokens).transpose(0, 1), src_tokens == PAD)
        return hidden.transpose(0, 1)


IDS = torch.tensor([[5, 9, 3, 12, 7], [8, 4, 6, PAD, PAD]])
CUT = torch.ones(5, 5).tril(-3).bool()


@pytest.mark.parametrize("mask", [None, CUT, -1.5 * CUT], ids=["no mask", "cut", "summand"])
def test_norms_under_masks_of_all_kinds_equal_the_direct_way(mask: Tensor | None) -> None:
    model = Encoder().double()
    model.layer.options["attn_mask"] = mask
    maps = NormAttribution(model).maps(IDS, per_head=True)
    with torch.no_grad():
        hidden = model.embed_tokens(IDS).transpose(0, 1)
        attention = model.layer.self_attn
        weights = attention.weights(hidden, hidden, IDS == PAD, mask)
        projection = attention.out_proj.weight.T.unflatten(0, (HEADS, -1))
        vectors = oracle.vectors_per_head(weights, attention.heads(attention.v_proj, hidden), projection)
    expected = vectors.norm(dim=-1) * (IDS != PAD)[:, None, :, None]
    torch.testing.assert_close(maps.encoder, expected[:, None], rtol=1e-11, atol=1e-13)


def test_what_lay_on_the_modules_lies_there_again() -> None:
    model = Encoder()
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return Attention.forward(model.layer.self_attn, *args, **kwargs)

    model.layer.self_attn.forward = own  # type: ignore[method-assign]
    weights: Any = AttentionWeights(model).maps(IDS).encoder
    assert calls
    assert torch.equal(AttentionWeights(model).maps(IDS).encoder, weights)  # type: ignore[arg-type]
    assert model.layer.self_attn.forward is own
    assert model.layer.can_use_fastpath == 1
    assert all(module.training for module in model.modules())


def test_another_attention_is_explained_as_it_runs() -> None:
    model = Encoder()
    attention = model.layer.self_attn
    attention.scaling = 2.0
    attention.heads = lambda projection, sequence: Attention.heads(projection, 1.01 * sequence)  # type: ignore[method-assign]
    with torch.no_grad():
        hidden = model.embed_tokens(IDS).transpose(0, 1)
        expected = attention.weights(hidden, hidden, IDS == PAD, None) * (IDS != PAD)[:, None, :, None]
    maps = AttentionWeights(model).maps(IDS, per_head=True)
    torch.testing.assert_close(maps.encoder, expected[:, None])


def test_nan_is_named_where_it_comes_from() -> None:
    model = Encoder()
    with torch.no_grad():
        model.layer.self_attn.v_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r'"layer\.self_attn\.v_proj\.weight" of Encoder'):
        NormAttribution(model).maps(IDS)


def test_threads() -> None:
    expect_the_same_in_threads(Encoder().eval(), IDS, 30)


def expect_the_same_in_threads(model: Any, ids: Tensor, explanations: int) -> None:
    """A model that runs, and is explained, in several threads at once gives what it gives alone."""
    with torch.no_grad():
        expected, maps = model(ids), AttentionWeights(model).maps(ids).encoder
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(torch.no_grad()(lambda: model(ids))) for _ in range(7 * explanations)]
        explained = [pool.submit(lambda: AttentionWeights(model).maps(ids).encoder) for _ in range(explanations)]
    for future in running:
        assert torch.equal(future.result(), expected)
    for explanation in explained:
        torch.testing.assert_close(explanation.result(), maps)
