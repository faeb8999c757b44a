"""What is known about a model follows it and does not keep it alive; embeddings, and what stands in for one."""

import gc
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from captum_norm import InvalidInputError, NormAttribution, UnsupportedModelError
from captum_norm.models.call import Positions
from captum_norm.models.embeddings import embeddings_through, replacement, run_embedded
from captum_norm.models.hooks import modules_of
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.model import understand
from tests import encoder_decoders, families
from tests.classifiers import MASK, TOKENIZER, classifier
from tests.hybrids import HYBRIDS


def test_the_modules_of_a_model_in_their_order() -> None:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(shared, nn.ReLU(), nn.ModuleDict({"again": shared}))
    inner.register_module("nothing", None)
    for model in (nn.ModuleList([inner, shared, nn.ModuleList([inner])]), families.build("bert")):
        assert modules_of(model) == list(model.modules())


def test_another_forward_function_is_called_by_its_own_names() -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    expected, own = NormAttribution(model).maps(ids).self_attention, model.forward
    model.forward = lambda words, seen=None: own(input_ids=words, attention_mask=seen)
    assert torch.equal(NormAttribution(model).maps(ids).self_attention, expected)


def own_forward(model: Any) -> None:
    model.forward = partial(lambda model, input_ids: type(model).forward(model, input_ids), model)


def default(model: Any) -> None:
    def forward(input_ids: Any, model: Any = model) -> Any:
        return type(model).forward(model, input_ids)

    model.forward = forward


def owner(model: Any) -> None:
    vars(model.get_input_embeddings())["owner"] = model


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "refer"),
    [("bert", own_forward), ("bert", default), ("bert", owner), ("bert", lambda _: None), ("bart", owner)],
)
def test_models_are_freed(name: str, refer: Any) -> None:
    source: Any = families if name == "bert" else encoder_decoders
    model, inputs = source.build(name), source.inputs(name)
    refer(model)
    NormAttribution(model).maps(inputs)
    left = ref(model)
    del model
    gc.collect()
    assert left() is None


def test_a_move_to_another_device_is_another_state() -> None:
    model = families.build("bert")
    known = understand(model)
    assert understand(model) is known
    assert understand(model.to("meta")) is not known


def test_that_layers_mix_positions_is_not_forgotten() -> None:
    model, ids = families.randomized(HYBRIDS["lfm2"], 0, torch.float32), families.inputs("llama")
    method = NormAttribution(model)
    maps = method.maps(ids)
    model.double()
    with pytest.raises(InvalidInputError):
        method.maps(ids + 10**6)
    with pytest.raises(UnsupportedModelError, match="mixes positions"):
        method.scores(maps, 0)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((5, 5), (3, 3)), ((5, 2, 4), (3, 1, 4)), ((2, 5), (1, 3)), ((2, 7), (1, 7)), ((5, 7), (5, 7)), ((), ())],
)
def test_an_excerpt_has_the_first_positions_of_the_first_example(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    value = torch.rand(shape)
    first = value[tuple(map(slice, expected))]
    assert torch.equal(Positions(length=5).cut(value, batch=2, length=3), first)


def test_what_stands_in_for_a_token() -> None:
    model, gpt2 = classifier(), families.build("gpt2", dtype=torch.float64)
    table = model.get_input_embeddings().weight.detach()
    gemma = families.build("gemma3", dtype=torch.float64)
    scaling = gemma.get_input_embeddings()  # what it returns is not what its table holds
    scaled = scaling.weight.detach() * scaling.embed_scale.to(scaling.weight.dtype)
    nothing = SimpleNamespace(mask_token_id=None, pad_token_id=None, all_special_ids=[])
    given = torch.arange(32.0)
    cases: list[tuple[Any, Any, Any, str, Tensor]] = [
        (model, None, TOKENIZER, f"mask:{MASK}", table[MASK]),
        (model, None, None, "pad:0", table[0]),
        (model, None, nothing, "mean", table.mean(0)),
        (model, "mask", TOKENIZER, f"mask:{MASK}", table[MASK]),
        (model, "pad", TOKENIZER, "pad:0", table[0]),
        (model, "zero", None, "zero", torch.zeros_like(table[0])),
        (model, 17, None, "id:17", table[17]),
        (model, given, None, "given", given),
        (gpt2, None, None, "mean", gpt2.get_input_embeddings().weight.detach().mean(0)),
        (gemma, 17, None, "id:17", scaled[17]),
        (gemma, "mean", None, "mean", scaled.mean(0)),
    ]
    for subject, wanted, tokenizer, name, vector in cases:
        found = replacement(subject, wanted, tokenizer)
        assert found.name == name
        torch.testing.assert_close(found.vector, vector, rtol=1e-12, atol=1e-14)


def test_the_mean_of_a_long_table_is_taken_in_parts_and_in_single_precision() -> None:
    model = nn.Module()
    table = nn.Embedding(9001, 3).to(torch.bfloat16)
    model.get_input_embeddings = lambda: table  # type: ignore[assignment]
    mean = table.weight.detach().float().mean(0)
    torch.testing.assert_close(replacement(model, "mean", None).vector, mean.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["bert", "electra", "albert", "opt-350m", "gpt2", "gemma2", "t5-encoder"])
def test_embeddings_are_replaced_where_they_are_looked_up(name: str) -> None:
    model, ids = families.build(name, dtype=torch.float64), families.inputs(name)
    others = ids.flip(0)
    output, embeddings = run_embedded(bind_inputs(model, others))
    with torch.no_grad(), embeddings_through(model, lambda _: embeddings):
        replaced = model(ids)
    torch.testing.assert_close(replaced[0], output[0], rtol=1e-10, atol=1e-10)
    assert not torch.equal(model(ids)[0], output[0])
    given, kept = run_embedded(bind_inputs(model, {"inputs_embeds": embeddings}))
    assert kept is not embeddings
    assert torch.equal(kept, embeddings)
    torch.testing.assert_close(given[0], output[0], rtol=1e-10, atol=1e-10)


def test_other_threads_keep_their_embeddings() -> None:
    model, ids = classifier(), torch.tensor([[1, 7, 9, 2]])
    expected = model(ids).logits
    results: list[Tensor] = []
    thread = Thread(target=lambda: results.append(model(ids).logits))
    with embeddings_through(model, torch.zeros_like):
        thread.start()
        thread.join()
        changed = model(ids).logits
    assert torch.equal(results[0], expected)
    assert not torch.equal(changed, expected)


def test_a_model_that_embeds_twice_is_refused() -> None:
    model, ids = classifier(), torch.tensor([[1, 7, 9, 2]])
    own = model.forward
    model.forward = lambda input_ids: own(input_ids).logits + own(input_ids).logits
    with pytest.raises(UnsupportedModelError, match="looked up embeddings in Embedding 2 times in one forward"):
        run_embedded(bind_inputs(model, ids))
    assert not model.get_input_embeddings()._forward_hooks
