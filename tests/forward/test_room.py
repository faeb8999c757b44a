"""One forward pass: completeness, threads, room for the results; layers that nobody asked for are not kept."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from captum.attr import Attribution, IntegratedGradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import captum_norm as cn
from captum_norm import NormAttribution, TokenAttribution, UnsupportedModelError, ValueZeroing
from captum_norm.errors import NotEnoughMemoryError
from captum_norm.forward import request, session
from captum_norm.forward.record import Layer
from tests import encoder_decoders, families
from tests.classifiers import classifier
from tests.families.family import new
from tests.test_matrix import interrupt

LONG = 64
MAP = LONG**2 * 4
LAYERS = 12  # so many that nothing else of a model is as large as their maps


@pytest.fixture(name="memory")
def small_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A memory in which maps of 64 positions are large, and in which so much is free."""
    memory = {"free": 0}
    monkeypatch.setattr(session, "LARGE_MAP", LONG**2)
    monkeypatch.setattr(request, "free_bytes", lambda _: memory["free"])
    return memory


def long_input(name: str) -> torch.Tensor:
    return families.inputs(name, batch=1, length=LONG)


def deep_bert() -> Any:
    return families.randomized(new("BertModel", **families.TEXT | {"num_hidden_layers": LAYERS}), 0, torch.float32)


def test_a_meter_whose_maps_are_not_chained_runs_the_model_twice() -> None:
    model, runs = families.build("bert"), list[int]()
    model.register_forward_hook(lambda *_: runs.append(1))
    cn.NormMeter(model).measure(families.inputs("bert"), scopes=["attn"])
    assert len(runs) == 2  # over an excerpt, to find its blocks, and over the inputs


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2"])
def test_maps_without_room_are_refused_before_the_forward_pass(name: str, memory: dict[str, int]) -> None:
    model, ids = families.build(name), long_input(name)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append((kwargs | {"": args})["input_ids"].shape), with_kwargs=True
    )
    method = cn.NormAttribution(model, "attn_res")
    memory["free"] = 5 * MAP - 1
    message = (
        r"the maps of 2 layers over 1 × 64 × 64 positions take 0\.0 MiB, for which 0\.1 MiB must be free, and 0\.1 MiB "
        r"are free on cpu; ask for fewer layers at a time \(layers= of maps\(\), layer= of attribute\(\)\), fewer ex"
    )
    with pytest.raises(NotEnoughMemoryError, match=message):
        method.maps(ids)
    assert all(length <= 16 for _, length in lengths)
    # As the sentence says.
    memory["free"] = 4 * MAP
    assert method.maps(ids, layers=[1]).self_attention.shape == (1, 1, LONG, LONG)
    assert method.attribute(ids, layer=-1).shape == (1, LONG)
    memory["free"] = 5 * MAP
    assert method.maps(ids).self_attention.shape == (1, 2, LONG, LONG)


def test_maps_of_single_heads_and_of_several_scopes_need_more(memory: dict[str, int]) -> None:
    model, ids = families.build("bert"), long_input("bert")
    meter = cn.NormMeter(model)
    asked: dict[str, Any] = {"scopes": ["attn", "attn_res"], "weights": True, "per_head": True, "head_norms": True}
    memory["free"] = (2 * (2 + 4 + 4) + 3) * MAP - 1
    with pytest.raises(NotEnoughMemoryError, match="or without single heads"):
        meter.measure(ids, **asked)
    memory["free"] += 1
    meter.measure(ids, **asked)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float64, 8), (torch.bfloat16, 4)])
def test_entries_are_as_wide_as_norms_are_computed(memory: dict[str, int], dtype: torch.dtype, itemsize: int) -> None:
    model, ids = families.build("bert", dtype=dtype), long_input("bert")
    memory["free"] = 5 * LONG**2 * itemsize - 1
    with pytest.raises(NotEnoughMemoryError):
        cn.NormAttribution(model).maps(ids)
    with pytest.raises(NotEnoughMemoryError):
        cn.ValueZeroing(model).maps(ids)
    memory["free"] += 1
    maps = cn.NormAttribution(model).maps(ids).self_attention
    assert maps.nbytes == 2 * LONG**2 * itemsize


def test_room_for_the_stacks_asked_for(memory: dict[str, int]) -> None:
    model = encoder_decoders.build("bart")
    inputs = encoder_decoders.inputs("bart", batch=16, source=30, target=8)
    meter = cn.NormMeter(model)
    memory["free"] = (2 + 3) * 16 * 30 * 8 * 4
    with pytest.raises(NotEnoughMemoryError, match="6 layers over 16 × 30 × 30 positions"):
        meter.measure(inputs, scopes=["attn"])
    assert list(meter.measure(inputs, scopes=["attn"], stacks=["cross"])) == ["cross"]


class Made(TorchDispatchMode):
    """Notes the size of every tensor that an operation makes, in bytes and in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes, self.elements = list[int](), list[int]()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        made = func(*args, **kwargs or {})
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in held:
                self.bytes.append(tensor.untyped_storage().nbytes())
                self.elements.append(self.bytes[-1] // tensor.element_size())
        return made


@pytest.mark.parametrize(
    "method",
    [
        lambda model: cn.AttentionWeights(model, "attn_res"),
        cn.AttentionRollout,
        lambda model: cn.AttentionWeights(model, "attn_res", differentiable=True),
        lambda model: cn.AttentionRollout(model, differentiable=True),
    ],
    ids=["weights", "rollout", "differentiable weights", "differentiable rollout"],
)
def test_the_maps_of_all_layers_are_there_once(method: Any) -> None:
    """What is made of weights takes their place; by the same numbers as where gradients need them."""
    model, ids = deep_bert(), long_input("bert")
    explain = method(model)
    expected = method(model.double()).maps(ids).encoder
    model.float()
    with Made() as made:
        maps = explain.maps(ids)
    assert sum(size >= LAYERS * MAP for size in made.bytes) == 1 or maps.encoder.requires_grad
    assert (maps.encoder - expected).abs().max() < 1e-6


def test_the_order_of_scopes_is_that_of_the_request() -> None:
    scopes: Any = ["atb_ff_res_ln", "attn", "atb"]
    (measured,) = cn.NormMeter(families.build("bert")).measure(families.inputs("bert"), scopes=scopes).values()
    assert [list(measured.norms), list(measured.mixing_ratio)] == [scopes, scopes]


def test_short_inputs_are_not_looked_at_beforehand(memory: dict[str, int]) -> None:
    assert memory["free"] == 0
    cn.NormAttribution(families.build("bert")).maps(families.inputs("bert", batch=1))


def test_an_argument_that_does_not_fit_an_excerpt(memory: dict[str, int]) -> None:
    model, ids = families.build("llama"), families.inputs("llama", batch=2, length=LONG)
    memory["free"] = 2**40
    expected = cn.AttentionBlockAttribution(model).maps(ids).decoder
    places = torch.arange(LONG)[None]  # of all examples, so it is not cut with them
    found = cn.AttentionBlockAttribution(model).maps({"input_ids": ids, "position_ids": places})
    torch.testing.assert_close(found.decoder, expected)


def test_layers_taken_away_or_added_are_noticed() -> None:
    model, ids = deep_bert(), families.inputs("bert")
    meter, layers = cn.NormMeter(model), model.encoder.layer
    scope: Any = "atb_ff_res_ln"
    every = meter.measure(ids, scopes=[scope])["encoder"].norms[scope]
    for count in (LAYERS, 2, LAYERS - 1):
        model.encoder.layer = layers[:count]
        last = meter.measure(ids, scopes=[scope], layers=[-1])["encoder"].norms[scope]
        assert torch.equal(last, every[:, count - 1 : count])


def test_layers_chosen_in_any_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also twice, and from the end; of layers out of reach nothing is kept."""
    model, ids = families.build("bert"), families.inputs("bert")
    model.encoder.layer.extend([type(model.encoder.layer[0])(model.config).eval() for _ in range(3)])
    method = cn.NormAttribution(model, "attn_res_ln")
    every: Any = method.maps(ids).encoder
    deltas: Any = method.maps(ids).convergence_delta
    for layers in ([-1], [-2, 0], [3, 3, 1], [-5], [4, -1, 4], [0]):
        maps: Any = method.maps(ids, layers=layers)
        assert torch.equal(maps.self_attention, every[:, layers])
        assert torch.equal(maps.convergence_delta, deltas[:, layers])
    alive: list[Any] = []
    counts = []
    begin = Layer.__init__

    def counting(layer: Layer, *arguments: Any, **options: Any) -> None:
        alive.append(weakref.ref(layer))
        begin(layer, *arguments, **options)
        counts.append(sum(one() is not None for one in alive))

    monkeypatch.setattr(Layer, "__init__", counting)
    method.maps(ids, layers=[-2, 0])
    assert max(counts) == 1


def test_a_decomposition_that_does_not_add_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model goes on with an output that its attention weights do not explain."""
    model, ids = families.build("bert"), families.inputs("bert")
    model.set_attn_implementation("eager")
    method = NormAttribution(model, "attn_res_ln")
    method.maps(ids)

    def changed(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        output, weights = original(*arguments, **options)
        return output * 1.001, weights

    module = hf.models.bert.modeling_bert
    original = module.eager_attention_forward
    monkeypatch.setattr(module, "eager_attention_forward", changed)
    with pytest.raises(UnsupportedModelError, match=r"weights of layer 0 .* not those of its own attention function"):
        method.maps(ids)


def test_threads_explain_one_model_by_gradients_and_by_norms() -> None:
    model, ids = classifier(dtype=torch.float32).train(), families.inputs("bert")
    methods: list[Attribution] = [
        TokenAttribution(model, IntegratedGradients, n_steps=10),
        NormAttribution(model),
        ValueZeroing(model),
    ]
    expected = [method.attribute(ids, target=1) for method in methods]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda index: methods[index % 3].attribute(ids, target=1), range(36))
        for index, scores in enumerate(results):
            torch.testing.assert_close(scores, expected[index % 3])
    assert all(module.training for module in model.modules())


def test_a_model_that_runs_elsewhere_meanwhile_gives_an_error_or_the_right_output() -> None:
    model, ids = families.build("llama"), families.inputs("llama")
    with torch.no_grad():
        expected, maps = model(ids).logits, NormAttribution(model).maps(ids).decoder

    def run() -> Tensor | str:
        try:
            with torch.no_grad():
                logits: Tensor = model(ids).logits
        except RuntimeError as error:
            return str(error)
        return logits

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run) for _ in range(60)]
        explained = [pool.submit(lambda: NormAttribution(model).maps(ids).decoder) for _ in range(10)]
        for future in running:
            result = future.result()
            if isinstance(result, str):
                assert "while another thread explains its model" in result
            else:
                torch.testing.assert_close(result, expected)
        for explanation in explained:
            torch.testing.assert_close(explanation.result(), maps)


def test_inference_mode_leaves_nothing_behind() -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    with torch.inference_mode():
        NormAttribution(model).maps(ids)
    maps: Any = NormAttribution(model, differentiable=True).maps(ids).encoder
    maps.sum().backward()


def test_a_model_that_was_changed_is_understood_anew() -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    method = NormAttribution(model)
    method.maps(ids)
    output = model.encoder.layer[0].attention.output
    for change in (
        lambda: setattr(output, "dense", torch.nn.Linear(32, 32)),
        lambda: model.encoder.layer.append(type(model.encoder.layer[0])(model.config).eval()),
        model.half,
        model.float,
    ):
        change()
        torch.testing.assert_close(method.maps(ids).encoder, NormAttribution(model).maps(ids).encoder)


def test_nothing_is_left_when_the_first_pass_fails() -> None:
    model, ids = families.build("bert").train(), families.inputs("bert")
    handle = model.encoder.layer[1].register_forward_pre_hook(interrupt)
    before = families.state_of(model)
    with pytest.raises(KeyboardInterrupt):
        NormAttribution(model).maps(ids)
    assert families.state_of(model) == before
    handle.remove()


def test_an_eager_function_that_needs_all_rows_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask built from the number of queries and keys would be wrong for some rows alone."""
    module = hf.models.llama.modeling_llama
    original = module.eager_attention_forward
    seen = []

    def own_mask(attention: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **options: Any) -> Any:
        seen.append(query.shape[2])
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        bias = torch.zeros(causal.shape).masked_fill(~causal, -1e9)
        return original(attention, query, key, value, bias[None, None], **options)

    model, ids = families.build("llama"), families.inputs("llama")
    model.set_attn_implementation("eager")
    expected = NormAttribution(model).maps(ids).decoder
    monkeypatch.setattr(module, "eager_attention_forward", own_mask)
    torch.testing.assert_close(NormAttribution(model, memory_budget=1).maps(ids).decoder, expected)
    assert max(seen) == ids.shape[1]
