"""What is free, and how much of it is taken."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from benchmarks.norms import peak_bytes
from captum_norm import AttentionBlockAttribution, AttentionWeights, NormAttribution, NormMeter, memory
from captum_norm.forward import record
from captum_norm.forward.record import WORKING_COPIES, attended_keys, parts_of
from captum_norm.memory import SHARE, UNKNOWN_FREE, MemoryBudget, free_bytes, readable
from captum_norm.models.attention import AttentionCall, Part
from tests import families, tiny
from tests.families import FAMILIES
from tests.test_matrix import SCOPES

CPU, META = torch.device("cpu"), torch.device("meta")

MEBIBYTE = 2**20


@pytest.fixture(name="system")
def pretended_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 100 MiB."""
    file = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MEMINFO", file)
    file.write_text("MemTotal:  999999 kB\nMemAvailable:  102400 kB\n")
    return file


def test_where_nothing_says_what_is_free_the_budget_is_a_stated_one(system: Path) -> None:
    assert free_bytes(CPU) == 100 * MEBIBYTE
    system.write_text("MemTotal:  999999 kB\n")
    assert free_bytes(CPU) is None
    system.unlink()
    assert free_bytes(CPU) is None
    assert free_bytes(META) is None
    assert MemoryBudget()[CPU] == UNKNOWN_FREE // SHARE


def test_a_budget_is_a_share_of_what_was_free_first_and_sizes_are_readable(system: Path) -> None:
    budget = MemoryBudget()
    assert budget[CPU] == 25 * MEBIBYTE
    system.write_text("MemAvailable:  4 kB\n")
    assert budget[CPU] == 25 * MEBIBYTE
    assert MemoryBudget()[CPU] == 1024
    assert MemoryBudget(17)[META] == 17
    assert (readable(2**30), readable(2**30 - 1), readable(0)) == ("1.0 GiB", "1024.0 MiB", "0.0 MiB")


LENGTH = 8192

MAP = LENGTH**2 * 4

SMALL: dict[str, Any] = {
    "vocab_size": len(tiny.WORDS),
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": LENGTH,
}


@pytest.fixture(name="bert", scope="module")
def long_bert() -> Any:
    torch.manual_seed(0)
    return hf.BertModel(hf.BertConfig(**SMALL), add_pooling_layer=False).train(False)


def ids(length: int) -> torch.Tensor:
    return torch.randint(4, len(tiny.WORDS), (1, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.long
def test_8192_tokens_take_their_map_and_the_budget(bert: Any) -> None:
    budget = 16 * 2**20
    meter = NormMeter(bert, memory_budget=budget)
    peak = peak_bytes(lambda: meter.measure(ids(LENGTH), scopes=["attn_res_ln"]))
    small = (
        LENGTH * 8 * 4 * 24
    )  # tensors of the hidden states' size: the model's own, values, forms of 2 heads, samples
    assert MAP < peak < MAP + budget + small


def test_8192_tokens_give_what_a_direct_computation_gives_for_some_of_them(bert: Any) -> None:
    """Rows from all over the sequence, each against its formula in float64."""
    maps: Any = NormAttribution(bert, memory_budget=2**22).maps(ids(LENGTH)).encoder
    layer = bert.encoder.layer[0].attention
    with torch.no_grad():
        hidden = bert.embeddings(ids(LENGTH)).double()
        queries, keys, values = (
            (hidden @ part.weight.double().T + part.bias.double()).unflatten(-1, (2, 4)).transpose(1, 2)
            for part in (layer.self.query, layer.self.key, layer.self.value)
        )
        rows = [0, 1, 63, 64, 4095, 4096, 8191]
        weights = (queries[:, :, rows] @ keys.mT / 2).softmax(-1)
        matrix = layer.output.dense.weight.double().T.unflatten(0, (2, 4))
        vectors = torch.einsum("bhqk,bhkd,hde->bqke", weights, values, matrix)
    torch.testing.assert_close(maps[0, 0, rows].double(), vectors[0].norm(dim=-1), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", [NormAttribution, AttentionWeights, AttentionBlockAttribution])
def test_no_part_is_larger_than_the_budget(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = families.build("bert"), families.inputs("bert", length=40)
    seen: list[Part] = []

    def noting(*arguments: Any) -> Iterator[Part]:
        for part in parts_of(*arguments):
            seen.append(part)
            yield part

    monkeypatch.setattr("captum_norm.forward.record.parts_of", noting)
    kind(model, memory_budget=4 * 40 * 4 * WORKING_COPIES * 5).maps(inputs)
    assert {part.rows.stop - part.rows.start for part in seen if part.rows.stop > 16} == {5}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral"])
def test_keys_that_no_row_attends_to_are_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of single rows; one example has padding."""
    model, inputs = families.build(name), families.inputs(name)
    mask = torch.ones_like(inputs)
    mask[1, :4] = 0
    asked: Any = {"scopes": SCOPES[FAMILIES[name].style], "weights": True, "head_norms": True}
    (expected,) = NormMeter(model).measure(inputs, mask, **asked).values()
    kept: list[Part] = []

    def attended(call: AttentionCall, part: Part, mask: Any) -> Part:
        kept.append(attended_keys(call, part, mask))
        return kept[-1]

    monkeypatch.setattr(record, "attended_keys", attended)
    (measured,) = NormMeter(model, memory_budget=1).measure(inputs, mask, **asked).values()
    ends = {part.rows.stop: part.keys.stop for part in kept if part.examples.start != 1}
    assert ends == {row: None if name == "bert" else row for row in range(1, 11)}  # the last row may attend to all
    for scope in asked["scopes"]:
        torch.testing.assert_close(measured.norms[scope], expected.norms[scope], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(measured.mixing_ratio[scope], expected.mixing_ratio[scope], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(measured.weights, expected.weights, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(measured.head_norms, expected.head_norms, rtol=1e-5, atol=1e-6)
