"""One forward pass: the completeness check, memory, and the model between threads."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from captum.attr import Attribution, IntegratedGradients
from torch import Tensor

from captum_norm import NormAttribution, TokenAttribution, UnsupportedModelError, ValueZeroing
from tests import families
from tests.classifiers import classifier
from tests.test_matrix import interrupt


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
