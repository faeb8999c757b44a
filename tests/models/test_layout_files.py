"""Layouts declared in a file."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from captum_norm import AttentionBlockAttribution, InvalidInputError, Layout, Site, UnsupportedModelError
from captum_norm.cli import main
from captum_norm.models import register_layouts, registered_layouts
from tests.tiny import bert_config, save_tiny

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "describe-a-model.md"
RIGHT = 'attention = "a"\nprojection = "p"\nresidual = "input"\ntotal = "norm.input"\n'


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captum_norm.models.layouts._registered", {})


class UnknownLayer(nn.Module):
    """Attention, and half of a feed-forward network added: the half is in the code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.feed_forward = UnknownAttention(), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        fed: Tensor = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + 0.5 * fed


class UnknownAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        attended: Tensor = self.out(((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2))
        return attended


class UnknownModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.Sequential(UnknownLayer(), UnknownLayer())

    def forward(self, ids: Tensor) -> Any:
        return self.layers(self.embedding(ids))


def test_the_file_of_the_guide_describes_a_class_unknown_to_us(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = UnknownModel().eval(), torch.tensor([[3, 1, 4, 1, 5]])
    with pytest.raises(UnsupportedModelError, match="Missing: a residual sum"):
        AttentionBlockAttribution(model).maps(ids)
    shown = re.search(r"```toml\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    (tmp_path / "layers.toml").write_text(shown[1].replace("MacaronLayer", "UnknownLayer"), encoding="utf-8")
    assert register_layouts(tmp_path / "layers.toml") == ("UnknownLayer",)
    assert registered_layouts()["UnknownLayer"] == Layout(
        "attention", "attention.out", Site.parse("input"), Site.parse("feed_forward_norm.input"), normed_input=True
    )
    maps: Any = AttentionBlockAttribution(model).maps(ids)
    assert maps.convergence_delta.max() < 1e-5
    assert maps.encoder.shape == (1, 2, 5, 5)


def test_every_key_is_read(tmp_path: Path) -> None:
    rest = 'minus = "mlp.output"\nbranch_norm = "b"\nfinal_norm = "f"\nbranch_factor = "s"\nresidual_factor = "r"\n'
    (tmp_path / "layers.toml").write_text(f"[Layer]\n{RIGHT}{rest}normed_input = true\n", encoding="utf-8")
    register_layouts(tmp_path / "layers.toml")
    assert registered_layouts() == {
        "Layer": Layout(
            "a", "p", Site("", "input"), Site("norm", "input"), Site("mlp", "output"), "b", "f", True, "s", "r"
        )
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[Layer", "cannot read layouts from"),
        (RIGHT, "got attention outside a table; expected [CLASS] before it"),
        (f'[Layer]\n{RIGHT}norm = "x"\n', 'got the key "norm" of [Layer]'),
        (f"[Layer]\n{RIGHT}normed_input = 1\n", "got normed_input = 1 of [Layer]"),
        (f"[Layer]\n{RIGHT}final_norm = true\n", "got final_norm = True of [Layer]"),
        ('[Layer]\nattention = "a"\ntotal = "x.input"\n', "has no projection and no residual"),
        (f"[Layer]\n{RIGHT}".replace("norm.input", "norm"), 'got the site "norm"; expected NAME.input'),
    ],
)
def test_what_is_wrong_is_said_and_nothing_declared(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "layers.toml").write_text(f"[Good]\n{RIGHT}" * (text != RIGHT) + text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=re.escape(problem)):
        register_layouts(tmp_path / "layers.toml")
    assert registered_layouts() == {}
    with pytest.raises(InvalidInputError, match="cannot read layouts from"):
        register_layouts(tmp_path / "none.toml")


def test_commands_take_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny(hf.BertModel(bert_config()), tmp_path))
    (tmp_path / "layers.toml").write_text(f"[BertAttention]\n{RIGHT}", encoding="utf-8")
    for arguments in (["models", "--check", folder], ["explain", "a dog", "--model", folder]):
        assert main([*arguments, "--layouts", str(tmp_path / "layers.toml")]) == 2
        assert "the pre-norm layout of BertAttention" in capsys.readouterr().err
