"""Models inside wrappers: parallel, sharded, compiled, offloaded, and in a PeftModel."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import captum_norm as cn
from alignment.identity import weights_digest
from captum_norm.forward.session import Session
from captum_norm.methods import METHODS
from captum_norm.models.wrappers import class_of, explained_module, unwrapped
from tests import tiny
from tests.models import wrapped as small
from tests.tiny import marian_config

pytestmark = small.WARNINGS


@pytest.fixture(scope="module", params=["bert", pytest.param("llama", marks=pytest.mark.long)])
def plain(request: pytest.FixtureRequest) -> tuple[small.Build, dict[str, Tensor | str]]:
    """Builds a model, and what each method gives for it."""
    build = small.BUILD[request.param]
    model = build()
    return build, {name: small.scores_of(name, model) for name in small.NAMES}


@pytest.mark.few
@pytest.mark.parametrize("wrapper", small.WRAP)
def test_every_method_gives_what_it_gives_for_the_model_inside(
    plain: tuple[small.Build, dict[str, Tensor | str]], wrapper: str, tmp_path: Path
) -> None:
    build, expected = plain
    small.FOLDER[:] = [tmp_path]
    with small.one_process():
        model = small.WRAP[wrapper](build())
        with torch.no_grad():
            before = model(**small.INPUTS).logits
        state = small.state_of(model)
        for name in small.NAMES:
            found = small.scores_of(name, model)
            if isinstance(found, str):
                assert found == expected[name], name
            elif wrapper == "fully_shard":  # its backward pass adds gradients up in another order
                torch.testing.assert_close(found, cast(Tensor, expected[name]), rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(found, cast(Tensor, expected[name])), name
        assert small.state_of(model) == state
        with torch.no_grad():
            assert torch.equal(model(**small.INPUTS).logits, before)


@pytest.mark.long
@pytest.mark.parametrize("build", small.BUILD.values(), ids=small.BUILD)
@pytest.mark.parametrize("wrap", ["compiled", "compiled in place", "compiled layers", "compiled forward"])
def test_compiled_code_is_neither_made_nor_lost(build: small.Build, wrap: str) -> None:
    model, compilations = build(), []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    torch.compiler.reset()
    original, torch_compile = build(), torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: torch_compile(function, backend=backend))
        patch.setattr(
            nn.Module,
            "compile",
            lambda module, **_: setattr(
                module, "_compiled_call_impl", torch_compile(module._call_impl, backend=backend)
            ),
        )
        model = small.WRAP[wrap](model)
    # A first explanation, before anything is compiled, compiles nothing.
    expected = cn.NormAttribution(original).attribute(small.INPUTS)
    assert torch.equal(cn.NormAttribution(model).attribute(small.INPUTS), expected)
    assert not compilations
    with torch.no_grad():
        before = model(**small.INPUTS).logits
    count = len(compilations)
    assert count
    for name in ("norm", "value-zeroing", "decompx", "attnlrp", "attention-gradient", "integrated-gradients"):
        small.scores_of(name, model)
    with torch.no_grad():
        assert torch.equal(model(**small.INPUTS).logits, before)
    assert len(compilations) == count
    torch.compiler.reset()


def test_weights_that_a_training_step_changed_are_read_anew() -> None:
    """Torch gathers the weights of each call at the same place in memory, without a new version."""

    def trained(model: Any) -> Any:
        model(**small.INPUTS, labels=torch.tensor([0, 2])).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return model

    with small.one_process():
        model = small.sharded_in_place(small.bert())
        method = cn.NormAttribution(model)
        before = method.attribute(small.INPUTS)
        after = method.attribute(small.INPUTS) if trained(model) is model else before
    assert not torch.allclose(after, before, rtol=0.01)
    torch.testing.assert_close(after, cn.NormAttribution(trained(small.bert())).attribute(small.INPUTS))


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_texts_and_digests_of_an_offloaded_model(how: str, tmp_path: Path) -> None:
    small.FOLDER[:] = [tmp_path]
    tokenizer, plain, model = tiny.tokenizer(), small.bert(), small.offloaded(how)(small.bert())
    expected, found = (
        cn.NormAttribution(m, tokenizer=tokenizer).attribute("a dog sees the cat") for m in (plain, model)
    )
    assert torch.equal(found, expected)
    assert weights_digest(model) == weights_digest(plain)


def test_weights_in_several_processes_are_refused() -> None:
    with small.one_process():
        model: Any = small.sharded(small.bert(), originals=True)
        model.sharding_strategy = torch.distributed.fsdp.ShardingStrategy.FULL_SHARD
        with pytest.raises(
            cn.UnsupportedModelError, match="has the weights of BertForSequenceClassification in 1 process"
        ):
            cn.NormAttribution(model).attribute(small.INPUTS)


def test_the_module_inside() -> None:
    model = small.bert()
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    for wrapper in (model, compiled, nn.DataParallel(compiled), small.adapted(model, "SEQ_CLS", small.LORA["bert"])):
        assert explained_module(wrapper) is unwrapped(wrapper) is model
        assert class_of(wrapper) is hf.BertForSequenceClassification


def test_a_wrapper_that_does_more_is_kept() -> None:
    class Doubled(nn.DataParallel):  # type: ignore[type-arg]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            return output | {"logits": 2 * output.logits}

    hooked, replaced = nn.DataParallel(small.bert()), nn.DataParallel(small.bert())
    hooked.register_forward_hook(lambda _, __, output: output | {"logits": 2 * output.logits})
    replaced.forward = Doubled(replaced.module).forward  # type: ignore[method-assign]
    expected = 2 * cn.DecompX(small.bert()).decompose(small.INPUTS, 1).number
    for model in (Doubled(small.bert()), hooked, replaced):
        torch.testing.assert_close(cn.DecompX(model).decompose(small.INPUTS, 1).number, expected)


def test_a_model_on_several_devices_is_explained_on_the_first() -> None:
    model = nn.DataParallel(small.bert())
    model.device_ids = [0, 1]
    assert torch.equal(
        cn.NormAttribution(model).attribute(small.INPUTS), cn.NormAttribution(small.bert()).attribute(small.INPUTS)
    )


def traced(model: Any) -> Any:
    model.config.return_dict = False
    return torch.jit.trace(model, tuple(small.INPUTS.values()), check_trace=False, strict=False)


def exported(model: Any) -> Any:
    return torch.export.export(model, (), small.INPUTS, strict=False)


OPAQUE: dict[str, tuple[Callable[[], Any], str]] = {
    "traced": (lambda: traced(small.bert()), "got TorchScript"),
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), "got TorchScript"),
    "exported": (lambda: exported(small.bert()), "got an exported program"),
    "exported module": (lambda: exported(small.bert()).module(), "got an exported program"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPAQUE)
def test_what_has_no_layers_is_refused_in_a_sentence(kind: str) -> None:
    make, message = OPAQUE[kind]
    model = make()
    calls: list[Callable[[], Any]] = [
        lambda: Session(model),
        lambda: cn.NormAttribution(model),
        lambda: cn.TokenAttribution(model, METHODS["saliency"].load()),
        lambda: cn.compare(model, small.IDS, methods=["norm"], keep_special=False),
    ]
    for call in calls:
        with pytest.raises(cn.UnsupportedModelError, match=message) as refusal:
            call()
        assert "pass the model that it was made from" in str(refusal.value)
        assert len(str(refusal.value)) <= 400


def test_mixed_precision_of_accelerate_is_refused_with_the_way_out() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(small.bert())
        with pytest.raises(cn.UnsupportedModelError, match=r"unwrap_model\(model, keep_fp32_wrapper=False\)"):
            cn.NormAttribution(model)
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    assert torch.equal(
        cn.NormAttribution(model).attribute(small.INPUTS), cn.NormAttribution(small.bert()).attribute(small.INPUTS)
    )


def test_value_zeroing_and_use_cache_through_wrappers() -> None:
    """The user's choice of a cache is the model's to make."""
    model = nn.DataParallel(small.llama())
    expected = cn.ValueZeroing(small.llama()).attribute(small.INPUTS)
    assert torch.equal(cn.ValueZeroing(model).attribute(small.INPUTS | {"use_cache": False}), expected)
    assert cn.AttentionWeights(model).attribute(small.INPUTS).shape == small.IDS.shape


def test_comparison_of_methods_on_a_wrapped_model() -> None:
    options: dict[str, Any] = {"methods": ["norm", "saliency"], "keep_special": False, "removal": "pad"}
    found, expected = (
        cn.compare(model, small.INPUTS, **options) for model in (nn.DataParallel(small.bert()), small.bert())
    )
    assert found.model == expected.model == "BertForSequenceClassification"
    for name, result in expected.results.items():
        assert torch.equal(found.results[name].scores, result.scores)


@pytest.mark.few
@pytest.mark.parametrize("name", small.BUILD)
@pytest.mark.parametrize("parts", ["attention", "head", "embeddings"])
def test_adapters_give_what_merged_weights_give(name: str, parts: str) -> None:
    targets = small.EMBEDDINGS[name] if parts == "embeddings" else small.LORA[name]
    wrapped = small.adapted(
        small.BUILD[name](), small.TASK[name], targets, modules_to_save=small.HEAD[name] if parts == "head" else None
    )
    merged = deepcopy(wrapped).merge_and_unload()
    with torch.no_grad():
        assert not torch.allclose(merged(**small.INPUTS).logits, small.BUILD[name]()(**small.INPUTS).logits, atol=0.01)
    state = small.state_of(wrapped)
    for method in small.NAMES:
        found, expected = small.scores_of(method, wrapped), small.scores_of(method, merged)
        if isinstance(found, str):
            assert found == expected, method
        else:
            # Adapters run in another order of additions; signed gradients cancel.
            torch.testing.assert_close(found, cast(Tensor, expected), rtol=1e-4, atol=1e-5)
    assert small.state_of(wrapped) == state


TASKS: dict[str, tuple[str, type, type, list[str]]] = {
    "tagger": ("TOKEN_CLS", hf.BertForTokenClassification, hf.BertConfig, small.LORA["bert"]),
    "answers": ("QUESTION_ANS", hf.BertForQuestionAnswering, hf.BertConfig, small.LORA["bert"]),
    "features": ("FEATURE_EXTRACTION", hf.BertModel, hf.BertConfig, small.LORA["bert"]),
    "causal classifier": ("SEQ_CLS", hf.LlamaForSequenceClassification, hf.LlamaConfig, small.LORA["llama"]),
}


@pytest.mark.parametrize("task", TASKS)
def test_task_classes_of_peft_change_no_position(task: str) -> None:
    kind, model_class, config_class, targets = TASKS[task]
    wrapped = small.adapted(small.randomized(lambda: model_class(config_class(**small.SIZES))), kind, targets)
    position: Any = {"features": "mean", "tagger": "mean", "answers": "mean", "causal classifier": "last"}[task]
    scores = cn.NormAttribution(wrapped).attribute(small.INPUTS)
    assert torch.equal(scores, cn.NormAttribution(wrapped.get_base_model()).attribute(small.INPUTS, position=position))
    if task == "tagger":
        with pytest.raises(cn.InvalidInputError, match="pass the position to read"):
            cn.AttentionTimesGradient(wrapped).attribute(small.INPUTS, 1)


def test_an_adapted_encoder_decoder() -> None:
    model = small.randomized(lambda: hf.MarianMTModel(marian_config(24, width=16)))
    wrapped = small.adapted(model, "SEQ_2_SEQ_LM", small.LORA["llama"])
    pair = small.INPUTS | {
        "decoder_input_ids": small.IDS.flip(1),
        "decoder_attention_mask": small.INPUTS["attention_mask"].flip(1),
    }
    found, expected = (cn.NormAttribution(m).maps(pair) for m in (wrapped, wrapped.get_base_model()))
    for stack in ("encoder", "decoder", "cross"):
        assert torch.equal(getattr(found, stack), getattr(expected, stack))


def test_adapters_that_choose_by_the_inputs_run_through_peft() -> None:
    """An activated LoRA begins at its invocation tokens, which PeftModel finds in the inputs."""
    wrapped = small.adapted(small.llama(), "CAUSAL_LM", small.LORA["llama"], alora_invocation_tokens=[9, 3])
    assert explained_module(wrapped) is wrapped
    ids = small.IDS[:1]
    with torch.no_grad():
        logits, without = (m(input_ids=ids).logits[0, -1] for m in (wrapped, unwrapped(wrapped)))
    assert not torch.allclose(logits, without, atol=1e-3)
    torch.testing.assert_close(cn.DecompX(wrapped).decompose(ids, 1).number, logits[1:2])
