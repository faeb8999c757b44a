"""Models spread over two processes: all of them explain together what one would, or refuse together; none waits."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import FileStore  # type: ignore[attr-defined] # not exported, but documented
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from captum_norm import CaptumNormError, NormAttribution
from tests.models.wrapped import BUILD, INPUTS, LORA, TASK, adapted, layers_of, scores_of

pytestmark = pytest.mark.long

PROCESSES = 2
SECONDS = 500
"""Twenty times what everything here takes on two busy cores; a process that waits longer waits for ever."""

Answers = dict[Any, Any]
FEW = ("norm", "value-zeroing", "decompx", "integrated-gradients")
ALONE = ("bert", "DistributedDataParallel")
TOGETHER = [("bert", "fully_shard"), ("llama", "of a PeftModel")]
LONG = {name: tensor.repeat(1, 10) for name, tensor in INPUTS.items()}


def in_place(model: Any, layers: nn.ModuleList) -> Any:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    return model


def build(name: str, wrapper: str) -> Any:
    plain = BUILD[name]()
    if wrapper == "DistributedDataParallel":
        return DistributedDataParallel(plain)
    if wrapper == "FullyShardedDataParallel":
        return FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
    layers = layers_of(plain)
    return in_place(adapted(plain, TASK[name], LORA[name]) if wrapper == "of a PeftModel" else plain, layers)


def message_of(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    try:
        NormAttribution(model).attribute(inputs)
    except CaptumNormError as error:
        return str(error)
    return ""


def trained(model: Any, name: str) -> Any:
    """A model after a step on the same inputs in all processes, so that all get the gradient of one."""
    labels = torch.tensor([0, 2]) if name == "bert" else INPUTS["input_ids"]
    model(**INPUTS, labels=labels).loss.backward()
    torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1).step()
    return model


def work(rank: int, folder: Path) -> None:
    """What one process finds; saved for the tests."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), PROCESSES)
    limit = timedelta(seconds=SECONDS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=limit)
    found: Answers = {}
    for case in (ALONE, *TOGETHER):
        model = build(*case)
        for method in FEW:
            found[*case, method] = scores_of(method, model)
        found[*case, "other inputs"] = message_of(model, LONG if rank else INPUTS)
        found[*case, "after training"] = NormAttribution(trained(model, case[0])).attribute(INPUTS)
    found["whole"] = message_of(build("llama", "FullyShardedDataParallel"), LONG if rank else INPUTS)
    torch.save(found, folder / f"found-{rank}")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Answers]:
    """What each process found."""
    folder, start = tmp_path_factory.mktemp("processes"), time.monotonic()
    running: Any = spawn(work, args=(folder,), nprocs=PROCESSES, join=False)
    while not running.join(timeout=1):
        if time.monotonic() - start > SECONDS:
            for process in running.processes:
                process.kill()
            pytest.fail(f"after {SECONDS} s the processes still wait for each other")
    return [torch.load(folder / f"found-{rank}", weights_only=True) for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", [ALONE, *TOGETHER], ids=" ".join)
def test_each_process_gives_what_one_gives_alone(answers: list[Answers], case: tuple[str, str]) -> None:
    name, wrapper = case

    def alone() -> Any:
        plain = BUILD[name]()
        return adapted(plain, TASK[name], LORA[name]) if wrapper == "of a PeftModel" else plain

    plain = alone()
    expected: dict[str, Any] = {method: scores_of(method, plain) for method in FEW}
    expected["after training"] = NormAttribution(trained(alone(), name)).attribute(INPUTS)
    assert not torch.allclose(expected["after training"], expected["norm"], rtol=1e-3)
    for found in answers:
        for method, scores in expected.items():
            # Sums over gradients are in another order.
            torch.testing.assert_close(found[*case, method], scores, rtol=1e-4, atol=1e-5)


def test_inputs_that_differ_are_refused_in_all_processes_that_need_each_other(answers: list[Answers]) -> None:
    for found in answers:
        assert found[*ALONE, "other inputs"] == ""  # each has the whole model
        for case in TOGETHER:
            message = found[*case, "other inputs"]
            assert message.startswith("got other inputs in one process than in another; a model with shards in 2")
            assert len(message) <= 400


def test_weights_that_only_the_whole_model_gathers_are_refused(answers: list[Answers]) -> None:
    for found in answers:
        assert "in 2 processes; explain the model in one process" in found["whole"]
