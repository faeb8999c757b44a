"""One forward pass: the completeness check, memory, and the model between threads."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from captum_norm import IncompleteDecompositionError, NormAttribution
from tests import families


def test_a_decomposition_that_does_not_add_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model goes on with an output that its attention weights do not explain."""
    model, ids = families.build("bert"), families.inputs("bert")
    method = NormAttribution(model, "attn_res_ln")
    method.maps(ids)

    def changed(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        output, weights = original(*arguments, **options)
        return output * 1.001, weights

    module = hf.models.bert.modeling_bert
    original = module.eager_attention_forward
    monkeypatch.setattr(module, "eager_attention_forward", changed)
    with pytest.raises(IncompleteDecompositionError, match=r"layer 0 do not add up .* relative error \d\.\de-04"):
        method.maps(ids)


def test_threads_explain_one_model() -> None:
    model, ids = families.build("llama"), families.inputs("llama")
    implementation = model.config._attn_implementation
    method = NormAttribution(model)
    expected = method.maps(ids).decoder
    with ThreadPoolExecutor(4) as pool:
        for maps in pool.map(lambda _: method.maps(ids), range(12)):
            assert maps.decoder is not None
            assert torch.equal(maps.decoder, expected)  # type: ignore[arg-type]
    assert model.config._attn_implementation == implementation


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
    expected = NormAttribution(model).maps(ids).decoder
    monkeypatch.setattr(module, "eager_attention_forward", own_mask)
    torch.testing.assert_close(NormAttribution(model, chunk_bytes=1).maps(ids).decoder, expected)
    assert max(seen) == ids.shape[1]
