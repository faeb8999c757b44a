"""Two small models, wrappers around them, and what every method gives for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # not exported, but documented
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from captum_norm import TokenAttribution, UnsupportedModelError
from captum_norm.methods import METHODS
from tests import families

IDS = torch.tensor([[5, 7, 9, 3, 11, 2], [5, 17, 19, 13, 0, 0]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}
SIZES = families.TEXT | {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24}
Build = Callable[[], Any]
# Of Captum's DeepLIFT, torch and peft about themselves.
WARNINGS = [
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
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("torch 2.6 shards no model in place on a CPU")
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


def as_a_whole(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def compiled(model: Any) -> Any:
        if Version(torch.__version__) < Version("2.7"):
            pytest.skip("torch 2.6 compiles wrappers of forward, as transformers has them, without their globals")
        return wrap(model)

    return compiled


FOLDER: list[Path] = []
WRAP: dict[str, Callable[[Any], Any]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "FSDP": lambda model: sharded(model, originals=False),
    "FSDP, original parameters": lambda model: sharded(model, originals=True),
    "fully_shard": sharded_in_place,
    "offloaded to memory": offloaded("memory"),
    "offloaded to disk": offloaded("disk"),
    "compiled": as_a_whole(lambda model: torch.compile(model, backend="eager")),
    "compiled in place": as_a_whole(compiled_inside),
    "compiled layers": compiled_layers,
    "compiled forward": as_a_whole(compiled_forward),
    "compiled in DataParallel": as_a_whole(lambda model: nn.DataParallel(torch.compile(model, backend="eager"))),
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


def state_of(model: nn.Module) -> list[Any]:
    """What is registered on each module, by which calls of ours could be noticed."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks")
    return [
        (name, module.training, *(list(vars(module)[kind].items()) for kind in kinds if kind in vars(module)))
        for name, module in model.named_modules()
    ]


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
