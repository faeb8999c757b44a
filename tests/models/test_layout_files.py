"""Layouts declared in a file."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from captum_norm import (
    AttentionBlockAttribution,
    FeedForwardLayout,
    InvalidInputError,
    Layout,
    Site,
    UnsupportedModelError,
)
from captum_norm.cli import main
from captum_norm.models import register_layouts, registered_feed_forwards, registered_layouts
from tests.tiny import bert_config, save_tiny

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "describe-a-model.md"
NEWLINE = "\n"
BEHIND = 'inner = ["i", "j"]\nouter = "o"\ntotal = "output"\n'
RIGHT = 'attention = "a"\nprojection = "p"\nresidual = "input"\ntotal = "norm.input"\n'


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for declared in ("_layouts", "_feed_forwards"):
        monkeypatch.setattr(f"captum_norm.models.layouts.{declared}", {})


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


def files_of_the_guide() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL)


def test_the_file_of_the_guide_describes_a_class_unknown_to_us(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = UnknownModel().eval(), torch.tensor([[3, 1, 4, 1, 5]])
    with pytest.raises(UnsupportedModelError, match="no sum with a residual stream"):
        AttentionBlockAttribution(model).maps(ids)
    shown, _ = files_of_the_guide()
    (tmp_path / "layers.toml").write_text(shown.replace("MacaronLayer", "UnknownLayer"), encoding="utf-8")
    assert register_layouts(tmp_path / "layers.toml") == ("UnknownLayer",)
    assert registered_layouts()["UnknownLayer"] == Layout(
        "attention", "attention.out", Site.parse("input"), Site.parse("feed_forward_norm.input"), normed_input=True
    )
    maps: Any = AttentionBlockAttribution(model).maps(ids)
    assert maps.convergence_delta.max() < 1e-5
    assert maps.encoder.shape == (1, 2, 5, 5)


class ScaledNetwork(nn.Module):
    """A factor that the layer does not hold itself is not looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.scale = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), 0.3

    def forward(self, hidden: Tensor) -> Tensor:
        written: Tensor = self.down(self.act(self.up(hidden)))
        return written


class ScaledLayer(UnknownLayer):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.gain = ScaledNetwork(), nn.Parameter(torch.randn(8))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden)) * self.gain
        fed: Tensor = self.network(self.feed_forward_norm(hidden)) * self.network.scale
        return hidden + fed


def test_a_file_describes_a_feed_forward_block_and_its_factors(tmp_path: Path) -> None:
    """The second file of the guide; by the numbers of a network whose outer map holds the factor."""
    torch.manual_seed(0)
    model, ids = UnknownModel().eval(), torch.tensor([[3, 1, 4, 1, 5]])
    model.layers = nn.Sequential(ScaledLayer(), ScaledLayer())
    with pytest.raises(UnsupportedModelError, match="no sum with a residual stream"):
        AttentionBlockAttribution(model, "atb_ff_res").maps(ids)
    _, shown = files_of_the_guide()
    (tmp_path / "layers.toml").write_text(shown, encoding="utf-8")
    assert register_layouts(tmp_path / "layers.toml") == ("ScaledLayer",)
    assert registered_layouts()["ScaledLayer"].branch_factor == "gain"
    declared = registered_feed_forwards()["ScaledLayer"]
    assert (declared.inner, declared.branch_factor) == (("network.up",), "network.scale")
    maps = AttentionBlockAttribution(model, "atb_ff_res").maps(ids)
    assert maps.convergence_delta is not None
    assert maps.convergence_delta.max() < 1e-5
    layer: Any
    with torch.no_grad():
        for layer in model.layers:
            layer.network.down.weight.mul_(0.3)
            layer.network.down.bias.mul_(0.3)
            layer.network.scale = 1.0
    plain = AttentionBlockAttribution(model, "atb_ff_res").maps(ids)
    torch.testing.assert_close(maps.encoder, plain.encoder)


def test_a_feed_forward_block_alone(tmp_path: Path) -> None:
    (tmp_path / "layers.toml").write_text(f"[Layer.feed_forward]\n{BEHIND}", encoding="utf-8")
    assert register_layouts(tmp_path / "layers.toml") == ("Layer",)
    assert registered_layouts() == {}
    assert registered_feed_forwards() == {"Layer": FeedForwardLayout(("i", "j"), "o", Site("", "output"))}


def test_every_key_is_read(tmp_path: Path) -> None:
    rest = 'minus = "mlp.output"\nbranch_norm = "b"\nfinal_norm = "f"\nbranch_factor = "s"\nresidual_factor = "r"\n'
    behind = f'{BEHIND}activation = "g"\nnorm = "n"\n{rest.partition(NEWLINE)[2]}'
    text = f"[Layer]\n{RIGHT}{rest}normed_input = true\n[Layer.feed_forward]\n{behind}"
    (tmp_path / "layers.toml").write_text(text, encoding="utf-8")
    register_layouts(tmp_path / "layers.toml")
    assert registered_layouts() == {
        "Layer": Layout(
            "a", "p", Site("", "input"), Site("norm", "input"), Site("mlp", "output"), "b", "f", True, "s", "r"
        )
    }
    assert registered_feed_forwards() == {
        "Layer": FeedForwardLayout(("i", "j"), "o", Site("", "output"), "g", "n", "b", "f", "s", "r")
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[Layer", "cannot read layouts from"),
        ("a = " + "[\n" * 10**5, "cannot read layouts from"),
        (RIGHT, "got attention outside a table; expected [CLASS] before it"),
        (f'[Layer]\n{RIGHT}norm = "x"\n', 'got the key "norm" of [Layer]'),
        (f"[Layer]\n{RIGHT}normed_input = 1\n", "got normed_input = 1 of [Layer]"),
        (f"[Layer]\n{RIGHT}final_norm = true\n", "got final_norm = True of [Layer]"),
        ('[Layer]\nattention = "a"\ntotal = "x.input"\n', "has no projection and no residual"),
        (f"[Layer]\n{RIGHT}".replace("norm.input", "norm"), "got the site 'norm'; expected NAME.input"),
        ("[Layer]\n", "[Layer] in"),
        (f"[Layer]\n{RIGHT}feed_forward = 1\n", "got 1 for [Layer.feed_forward] in"),
        ('[Layer.feed_forward]\ninner = "i"\n', "got inner = 'i' of [Layer.feed_forward] in"),
        ('[Layer.feed_forward]\ninner = ["i"]\n', "has no outer and no total"),
        (f"[Layer.feed_forward]\n{BEHIND}minus = 'x'\n", 'got the key "minus" of [Layer.feed_forward]'),
    ],
)
def test_what_is_wrong_is_said_and_nothing_declared(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "layers.toml").write_text(f"[Good]\n{RIGHT}" * (text != RIGHT) + text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=re.escape(problem)):
        register_layouts(tmp_path / "layers.toml")
    assert {**registered_layouts(), **registered_feed_forwards()} == {}
    with pytest.raises(InvalidInputError, match=r"cannot read .*none\.toml: there is no such file"):
        register_layouts(tmp_path / "none.toml")


def test_commands_take_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny(hf.BertModel(bert_config()), tmp_path))
    (tmp_path / "layers.toml").write_text(f"[BertAttention]\n{RIGHT}", encoding="utf-8")
    for arguments in (["models", "--check", folder], ["explain", "a dog", "--model", folder]):
        assert main([*arguments, "--layouts", str(tmp_path / "layers.toml")]) == 2
        assert "the pre-norm layout of BertAttention" in capsys.readouterr().err
