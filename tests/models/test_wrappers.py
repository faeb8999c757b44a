"""Models inside wrappers: adapted, parallel, sharded, compiled, offloaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # not exported, but documented
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from captum_norm import (
    AttentionTimesGradient,
    AttentionWeights,
    DecompX,
    InvalidInputError,
    NormAttribution,
    TokenAttribution,
    UnsupportedModelError,
    ValueZeroing,
)
from captum_norm.comparison import compare
from captum_norm.forward.session import Session
from captum_norm.identity import weights_digest
from captum_norm.methods import METHODS
from captum_norm.models.wrappers import class_of, explained_module, unwrapped
from tests import families, tiny

IDS = torch.tensor([[5, 7, 9, 3, 11, 2], [5, 17, 19, 13, 0, 0]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
Build = Callable[[], Any]
# Of Captum's DeepLIFT, torch and peft about themselves.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{begin}")
    for begin in (
        "Setting forward, backward hooks",
        "FSDP is switching to use `NO_SHARD`",
        "The `NO_SHARD` sharding strategy",
        "The .grad attribute of a Tensor that is not a leaf",
        "`is_gradient_checkpointing` is deprecated",
    )
]


def randomized(make: Build) -> Any:
    return families.randomized(make, 0, torch.float32)


def bert() -> Any:
    return randomized(lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES | {"num_labels": 3})))


def llama() -> Any:
    return randomized(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **SIZES)))


BUILD: dict[str, Build] = {"bert": bert, "llama": llama}


def layers_of(model: Any) -> nn.ModuleList:
    found: nn.ModuleList = model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers
    return found


@contextmanager
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def compiled_layers(model: Any) -> Any:
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = cast(nn.Module, torch.compile(layer, backend="eager"))
    return model


def compiled_inside(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def sharded(model: Any, *, originals: bool) -> nn.Module:
    def shard(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, use_orig_params=originals, device_id=torch.device("cpu"))

    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = shard(layer)
    return shard(model)


def sharded_in_place(model: Any) -> Any:
    """The parts of the first layer on their own, the other layer as a whole, the rest with the model."""
    mesh, (first, second) = init_device_mesh("cpu", (1,)), layers_of(model)
    for part in (*first.children(), first, second, model):
        fully_shard(part, mesh=mesh)
    return model


def offloaded(how: str) -> Callable[[Any], Any]:
    def offload(model: Any) -> Any:
        accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
        if how == "memory":
            return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        return accelerate.disk_offload(model, FOLDER[0], execution_device=torch.device("cpu"))

    return offload


FOLDER: list[Path] = []
WRAP: dict[str, Callable[[Any], Any]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "FSDP": lambda model: sharded(model, originals=False),
    "FSDP, original parameters": lambda model: sharded(model, originals=True),
    "fully_shard": sharded_in_place,
    "offloaded to memory": offloaded("memory"),
    "offloaded to disk": offloaded("disk"),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": compiled_inside,
    "compiled layers": compiled_layers,
    "compiled forward": compiled_forward,
    "compiled in DataParallel": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


def scores_of(name: str, model: nn.Module) -> Tensor | str:
    """What a method gives for the second class or token, or the message of its refusal."""
    method = METHODS[name]
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - what GradientSHAP draws from
    if method.maps:
        target = None if method.target == "never" else 1
        try:
            scores: Tensor = method.load()(model).attribute(INPUTS, target)
        except UnsupportedModelError as refusal:
            return str(refusal).partition('"')[0]
        return scores
    if method.package != "captum.attr":
        found: Tensor = method.load()(model).attribute(INPUTS)
        return found
    few: dict[str, Any] = {
        key: 2 if key in ("n_steps", "n_samples") else value for key, value in method.options.items()
    }
    attributed: Tensor = TokenAttribution(model, method.load(), baseline="mean", **few).attribute(INPUTS, 1)
    return attributed


# As many samples as LIME's regression needs take seconds, and it sees the model as occlusion does.
NAMES = [name for name in METHODS if name != "lime"]


@pytest.fixture(scope="module", params=list(BUILD))
def plain(request: pytest.FixtureRequest) -> tuple[Build, dict[str, Tensor | str]]:
    """Builds a model, and what each method gives for it."""
    build = BUILD[request.param]
    model = build()
    return build, {name: scores_of(name, model) for name in NAMES}


def state_of(model: nn.Module) -> list[Any]:
    """What is registered on each module, by which calls of ours could be noticed."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks")
    return [
        (name, module.training, *(list(vars(module)[kind].items()) for kind in kinds if kind in vars(module)))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("wrapper", WRAP)
def test_every_method_gives_what_it_gives_for_the_model_inside(
    plain: tuple[Build, dict[str, Tensor | str]], wrapper: str, tmp_path: Path
) -> None:
    build, expected = plain
    FOLDER[:] = [tmp_path]
    with one_process():
        model = WRAP[wrapper](build())
        with torch.no_grad():
            before = model(**INPUTS).logits
        state = state_of(model)
        for name in NAMES:
            found = scores_of(name, model)
            if isinstance(found, str):
                assert found == expected[name], name
            elif wrapper == "fully_shard":  # its backward pass adds gradients up in another order
                torch.testing.assert_close(found, cast(Tensor, expected[name]), rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(found, cast(Tensor, expected[name])), name
        assert state_of(model) == state
        with torch.no_grad():
            assert torch.equal(model(**INPUTS).logits, before)


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@pytest.mark.parametrize("wrap", ["compiled", "compiled in place", "compiled layers", "compiled forward"])
def test_compiled_code_is_neither_made_nor_lost(build: Build, wrap: str) -> None:
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
        model = WRAP[wrap](model)
    # A first explanation, before anything is compiled, compiles nothing.
    expected = NormAttribution(original).attribute(INPUTS)
    assert torch.equal(NormAttribution(model).attribute(INPUTS), expected)
    assert not compilations
    with torch.no_grad():
        before = model(**INPUTS).logits
    count = len(compilations)
    assert count
    for name in ("norm", "value-zeroing", "decompx", "attention-gradient", "integrated-gradients"):
        scores_of(name, model)
    with torch.no_grad():
        assert torch.equal(model(**INPUTS).logits, before)
    assert len(compilations) == count
    torch.compiler.reset()


def test_weights_that_a_training_step_changed_are_read_anew() -> None:
    """Torch gathers the weights of each call at the same place in memory, without a new version."""

    def trained(model: Any) -> Any:
        model(**INPUTS, labels=torch.tensor([0, 2])).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return model

    with one_process():
        model = sharded_in_place(bert())
        method = NormAttribution(model)
        before = method.attribute(INPUTS)
        after = method.attribute(INPUTS) if trained(model) is model else before
    assert not torch.allclose(after, before, rtol=0.01)
    torch.testing.assert_close(after, NormAttribution(trained(bert())).attribute(INPUTS))


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_texts_and_digests_of_an_offloaded_model(how: str, tmp_path: Path) -> None:
    FOLDER[:] = [tmp_path]
    tokenizer, plain, model = tiny.tokenizer(), bert(), offloaded(how)(bert())
    expected, found = (NormAttribution(m, tokenizer=tokenizer).attribute("a dog sees the cat") for m in (plain, model))
    assert torch.equal(found, expected)
    assert weights_digest(model) == weights_digest(plain)


def test_weights_in_several_processes_are_refused() -> None:
    with one_process():
        model: Any = sharded(bert(), originals=True)
        model.sharding_strategy = torch.distributed.fsdp.ShardingStrategy.FULL_SHARD
        with pytest.raises(
            UnsupportedModelError, match="has the weights of BertForSequenceClassification in 1 process"
        ):
            NormAttribution(model).attribute(INPUTS)


LORA = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}
HEAD = {"bert": ["classifier"], "llama": ["lm_head", "embed_tokens"]}
EMBEDDINGS = {"bert": ["word_embeddings"], "llama": ["embed_tokens"]}
TASK = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM"}


def adapted(model: nn.Module, task: str, targets: list[str], **options: Any) -> Any:
    """A model with LoRA on some modules; nothing that it adds is zero."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(task_type=task, target_modules=targets, init_lora_weights=False, **options)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return wrapped


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("parts", ["attention", "head", "embeddings"])
def test_adapters_give_what_merged_weights_give(name: str, parts: str) -> None:
    targets = EMBEDDINGS[name] if parts == "embeddings" else LORA[name]
    wrapped = adapted(BUILD[name](), TASK[name], targets, modules_to_save=HEAD[name] if parts == "head" else None)
    merged = deepcopy(wrapped).merge_and_unload()
    with torch.no_grad():
        assert not torch.allclose(merged(**INPUTS).logits, BUILD[name]()(**INPUTS).logits, atol=0.01)
    state = state_of(wrapped)
    for method in NAMES:
        found, expected = scores_of(method, wrapped), scores_of(method, merged)
        if isinstance(found, str):
            assert found == expected, method
        else:
            # Adapters run in another order of additions; signed gradients cancel.
            torch.testing.assert_close(found, cast(Tensor, expected), rtol=1e-4, atol=1e-5)
    assert state_of(wrapped) == state


def test_an_adapter_that_is_switched_off_is_not_explained() -> None:
    plain, wrapped = bert(), adapted(bert(), "SEQ_CLS", LORA["bert"])
    method = NormAttribution(wrapped)
    adapted_scores, expected = method.attribute(INPUTS), NormAttribution(plain).attribute(INPUTS)
    assert not torch.allclose(adapted_scores, expected)
    with wrapped.disable_adapter():
        torch.testing.assert_close(method.attribute(INPUTS), expected)
    torch.testing.assert_close(method.attribute(INPUTS), adapted_scores)


TASKS: dict[str, tuple[str, type, type, list[str]]] = {
    "tagger": ("TOKEN_CLS", hf.BertForTokenClassification, hf.BertConfig, LORA["bert"]),
    "answers": ("QUESTION_ANS", hf.BertForQuestionAnswering, hf.BertConfig, LORA["bert"]),
    "features": ("FEATURE_EXTRACTION", hf.BertModel, hf.BertConfig, LORA["bert"]),
    "causal classifier": ("SEQ_CLS", hf.LlamaForSequenceClassification, hf.LlamaConfig, LORA["llama"]),
}


@pytest.mark.parametrize("task", TASKS)
def test_task_classes_of_peft_change_no_position(task: str) -> None:
    kind, model_class, config_class, targets = TASKS[task]
    wrapped = adapted(randomized(lambda: model_class(config_class(**SIZES))), kind, targets)
    position: Any = {"features": "mean", "tagger": "mean", "answers": "mean", "causal classifier": "last"}[task]
    scores = NormAttribution(wrapped).attribute(INPUTS)
    assert torch.equal(scores, NormAttribution(wrapped.get_base_model()).attribute(INPUTS, position=position))
    if task == "tagger":
        with pytest.raises(InvalidInputError, match="pass the position to read"):
            AttentionTimesGradient(wrapped).attribute(INPUTS, 1)


def test_an_adapted_encoder_decoder() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 24, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0,
        "decoder_start_token_id": 2,
    }  # fmt: skip
    model = randomized(lambda: hf.MarianMTModel(hf.MarianConfig(**sizes)))
    wrapped = adapted(model, "SEQ_2_SEQ_LM", LORA["llama"])
    pair = INPUTS | {"decoder_input_ids": IDS.flip(1), "decoder_attention_mask": INPUTS["attention_mask"].flip(1)}
    found, expected = (NormAttribution(m).maps(pair) for m in (wrapped, wrapped.get_base_model()))
    for stack in ("encoder", "decoder", "cross"):
        assert torch.equal(getattr(found, stack), getattr(expected, stack))


def test_adapters_that_choose_by_the_inputs_run_through_peft() -> None:
    """An activated LoRA begins at its invocation tokens, which PeftModel finds in the inputs."""
    wrapped = adapted(llama(), "CAUSAL_LM", LORA["llama"], alora_invocation_tokens=[9, 3])
    assert explained_module(wrapped) is wrapped
    ids = IDS[:1]
    with torch.no_grad():
        logits, without = (m(input_ids=ids).logits[0, -1] for m in (wrapped, unwrapped(wrapped)))
    assert not torch.allclose(logits, without, atol=1e-3)
    torch.testing.assert_close(DecompX(wrapped).decompose(ids, 1).number, logits[1:2])


def test_the_module_inside() -> None:
    model = bert()
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    for wrapper in (model, compiled, nn.DataParallel(compiled), adapted(model, "SEQ_CLS", LORA["bert"])):
        assert explained_module(wrapper) is unwrapped(wrapper) is model
        assert class_of(wrapper) is hf.BertForSequenceClassification


def test_a_wrapper_that_does_more_is_kept() -> None:
    class Doubled(nn.DataParallel):  # type: ignore[type-arg]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            return output | {"logits": 2 * output.logits}

    hooked, replaced = nn.DataParallel(bert()), nn.DataParallel(bert())
    hooked.register_forward_hook(lambda _, __, output: output | {"logits": 2 * output.logits})
    replaced.forward = Doubled(replaced.module).forward  # type: ignore[method-assign]
    expected = 2 * DecompX(bert()).decompose(INPUTS, 1).number
    for model in (Doubled(bert()), hooked, replaced):
        torch.testing.assert_close(DecompX(model).decompose(INPUTS, 1).number, expected)


def test_a_model_on_several_devices_is_explained_on_the_first() -> None:
    model = nn.DataParallel(bert())
    model.device_ids = [0, 1]
    assert torch.equal(NormAttribution(model).attribute(INPUTS), NormAttribution(bert()).attribute(INPUTS))


def traced(model: Any) -> Any:
    model.config.return_dict = False
    return torch.jit.trace(model, tuple(INPUTS.values()), check_trace=False, strict=False)


def exported(model: Any) -> Any:
    return torch.export.export(model, (), INPUTS, strict=False)


OPAQUE: dict[str, tuple[Callable[[], Any], str]] = {
    "traced": (lambda: traced(bert()), "got TorchScript"),
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), "got TorchScript"),
    "exported": (lambda: exported(bert()), "got an exported program"),
    "exported module": (lambda: exported(bert()).module(), "got an exported program"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPAQUE)
def test_what_has_no_layers_is_refused_in_a_sentence(kind: str) -> None:
    make, message = OPAQUE[kind]
    model = make()
    calls: list[Callable[[], Any]] = [
        lambda: Session(model),
        lambda: NormAttribution(model),
        lambda: TokenAttribution(model, METHODS["saliency"].load()),
        lambda: compare(model, IDS, methods=["norm"], keep_special=False),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModelError, match=message) as refusal:
            call()
        assert "pass the model that it was made from" in str(refusal.value)
        assert len(str(refusal.value)) <= 400


def test_mixed_precision_of_accelerate_is_refused_with_the_way_out() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(bert())
        with pytest.raises(UnsupportedModelError, match=r"unwrap_model\(model, keep_fp32_wrapper=False\)"):
            NormAttribution(model)
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    assert torch.equal(NormAttribution(model).attribute(INPUTS), NormAttribution(bert()).attribute(INPUTS))


def test_value_zeroing_and_use_cache_through_wrappers() -> None:
    """The user's choice of a cache is the model's to make."""
    model = nn.DataParallel(llama())
    expected = ValueZeroing(llama()).attribute(INPUTS)
    assert torch.equal(ValueZeroing(model).attribute(INPUTS | {"use_cache": False}), expected)
    assert AttentionWeights(model).attribute(INPUTS).shape == IDS.shape


def test_comparison_of_methods_on_a_wrapped_model() -> None:
    options: dict[str, Any] = {"methods": ["norm", "saliency"], "keep_special": False, "removal": "pad"}
    found, expected = (compare(model, INPUTS, **options) for model in (nn.DataParallel(bert()), bert()))
    assert found.model == expected.model == "BertForSequenceClassification"
    for name, result in expected.results.items():
        assert torch.equal(found.results[name].scores, result.scores)
