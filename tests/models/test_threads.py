"""Plain calls of a model while another thread explains it give the model's own output, and nobody hangs."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import NormAttribution, TokenAttribution, UnsupportedModelError, ValueZeroing
from captum_norm.models import evaluating, threads
from captum_norm.models.threads import explaining
from tests import families
from tests.classifiers import classifier
from tests.torch_models import Classifier

IDS = torch.tensor([[1, 7, 9, 5, 2]])
LIMIT = 60
Methods = dict[str, Callable[[nn.Module], Any]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PATIENCE", 0.3)


@contextmanager
def elsewhere(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Runs ``work`` in a thread; gives what waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield lambda: future.result(LIMIT)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        output = model(IDS)
    return output if isinstance(output, Tensor) else output[0]


def built(name: str) -> Any:
    return (
        families.randomized(lambda: Classifier(batch_first=True, dropout=0.0), 0, torch.float32)
        if name == "torch.nn"
        else (families.build(name))
    )


# By the interface with torch's attention and eagerly, by the model's own code with either, by torch.nn's fast path.
@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma2", "falcon-rw", "bloom", "gptj", "torch.nn"])
@pytest.mark.parametrize("training", [False, True])
def test_calls_meanwhile_give_the_models_own_output(name: str, training: bool) -> None:
    """Exactly, in a pool that calls and explains in turns, also after an explanation that raised."""
    model = built(name)
    if hasattr(model, "config") and name not in ("gemma2", "falcon-rw"):
        model.set_attn_implementation("sdpa")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train(training)
    expected, scores = logits(model), NormAttribution(model).attribute(IDS)

    def explain(number: int) -> Tensor | None:
        if number % 3:
            return NormAttribution(model).attribute(IDS)
        with pytest.raises(RuntimeError, match="hook"):
            failing(model)
        return None

    with ThreadPoolExecutor(4) as pool:
        explained = [pool.submit(explain, number) for number in range(6)]
        calls = [pool.submit(logits, model) for _ in range(24)]
    for call in calls:
        assert torch.equal(call.result(LIMIT), expected)
    for explanation in explained:
        result = explanation.result(LIMIT)
        assert result is None or torch.equal(result, scores)
    assert model.training == training


def failing(model: nn.Module) -> None:
    """An explanation that a hook of the user's ends, in this thread alone."""
    me = threading.get_ident()

    def refuse(*_: Any) -> None:
        if threading.get_ident() == me:
            raise KeyError("hook")

    handle = next(m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)).register_forward_hook(refuse)
    try:
        NormAttribution(model).attribute(IDS)
    except Exception as error:
        raise RuntimeError("hook") from error
    finally:
        handle.remove()
    raise AssertionError("the hook did not run")


def test_a_call_that_is_running_ends_before_a_model_is_changed() -> None:
    model = families.build("falcon-rw")
    expected, inside, go_on = logits(model), threading.Event(), threading.Event()
    seen: list[Any] = []

    def stop(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            # Slowly, but it moves: who waits for it does not lose patience.
            for _turn in range(200):
                if go_on.wait(0.01):
                    break
            seen.append(model.config._attn_implementation)

    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    handle = first.register_forward_hook(stop)
    before = model.config._attn_implementation
    with elsewhere(lambda: logits(model)) as result:
        assert inside.wait(LIMIT)
        threading.Timer(0.5, go_on.set).start()
        NormAttribution(model).attribute(IDS)
        assert go_on.is_set()
        assert torch.equal(result(), expected)
    handle.remove()
    assert set(seen) == {before}


def test_who_explains_may_call_the_model_in_a_hook_and_explain_it_there() -> None:
    model = families.build("bert")
    plain = NormAttribution(model).attribute(IDS)
    calls: list[Tensor] = []
    layer = model.encoder.layer[1]

    def call(*_: Any) -> None:
        if not calls:
            calls.append(torch.zeros(1))
            calls.append(logits(model))
            calls.append(NormAttribution(model).attribute(IDS))

    handle = layer.register_forward_pre_hook(call)
    implementation = model.config._attn_implementation
    with explaining(model):
        logits(model)
    handle.remove()
    torch.testing.assert_close(calls[1], logits(model))
    torch.testing.assert_close(calls[2], plain)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", ["bert", "falcon-rw", "torch.nn"])
def test_threads_that_wait_for_each_other_go_on(name: str) -> None:
    """The one that explains waits, in a hook of the user's, for a call in another thread, or for a lock held there."""
    model = built(name)
    if name == "bert":
        model.set_attn_implementation("sdpa")
    expected, scores = logits(model), NormAttribution(model).attribute(IDS)
    main, results, lock = threading.get_ident(), list[Tensor](), threading.Lock()
    first = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))
    with ThreadPoolExecutor(1) as pool:

        def call_elsewhere(*_: Any) -> None:
            if threading.get_ident() == main:
                results.append(pool.submit(logits, model).result(LIMIT))

        handle = first.register_forward_hook(call_elsewhere)
        assert torch.equal(NormAttribution(model).attribute(IDS), scores)
        handle.remove()
    assert results
    for result in results:
        torch.testing.assert_close(result, expected)
    holds = threading.Event()

    def call_with_lock() -> Tensor:
        with lock:
            holds.set()
            time.sleep(0.05)
            return logits(model)

    def want_lock(*_: Any) -> None:
        if threading.get_ident() == main:
            assert lock.acquire(timeout=LIMIT)
            lock.release()

    with elsewhere(lambda: holds.wait(LIMIT)), elsewhere(call_with_lock) as called:
        assert holds.wait(LIMIT)
        handle = first.register_forward_hook(want_lock)
        assert torch.equal(NormAttribution(model).attribute(IDS), scores)
        handle.remove()
        torch.testing.assert_close(called(), expected)


def test_a_thread_whose_call_never_ends_does_not_stop_an_explanation() -> None:
    model, stuck, free = families.build("bert"), threading.Event(), threading.Event()
    main, scores = threading.get_ident(), NormAttribution(model).attribute(IDS)

    def hang(*_: Any) -> None:
        if threading.get_ident() != main:
            stuck.set()
            assert free.wait(LIMIT)

    handle = model.embeddings.register_forward_hook(hang)
    with elsewhere(lambda: logits(model)) as result:
        assert stuck.wait(LIMIT)
        assert torch.equal(NormAttribution(model).attribute(IDS), scores)
        free.set()
        assert torch.equal(result(), logits(model))
    handle.remove()


def test_a_long_operation_is_no_standstill() -> None:
    """A call in training mode meanwhile is trained by, however long one step of the explanation takes."""
    model = families.build("bert").train()
    main, matrix = threading.get_ident(), torch.randn(900, 900)
    begun, seen = threading.Event(), list[bool]()

    def compute(*_: Any) -> None:
        if threading.get_ident() == main and not begun.is_set():
            begun.set()
            end = time.thread_time() + 4 * threads.PATIENCE
            while time.thread_time() < end:
                torch.linalg.eigvals(matrix)

    def train() -> None:
        assert begun.wait(LIMIT)
        model(IDS)
        seen.append(model.training)

    handle = model.embeddings.register_forward_hook(compute)
    with elsewhere(train) as result:
        NormAttribution(model).attribute(IDS)
        result()
    handle.remove()
    assert seen == [True]


def test_who_waits_goes_on_where_the_wait_for_others_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, waits = families.build("bert"), threading.Event()

    def interrupted(change: Any) -> None:
        waits.set()
        while not change.waiting:
            time.sleep(0.01)
        raise KeyboardInterrupt

    def call() -> Tensor:
        assert waits.wait(LIMIT)
        return logits(model)

    monkeypatch.setattr(threads._Change, "begin", interrupted)
    thread = threading.Thread(target=call)
    thread.start()
    with pytest.raises(KeyboardInterrupt), explaining(model):
        pass
    # This thread moves on and on, from frame to frame, so nobody takes it for blocked.
    end = time.monotonic() + LIMIT / 6
    while thread.is_alive() and time.monotonic() < end:
        sum(number * number for number in range(1000))
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork on this system")
def test_a_fork_finds_the_model_as_it_was() -> None:
    model, inside = families.build("bert"), threading.Event()

    def slow(*_: Any) -> None:
        inside.set()
        time.sleep(0.5)

    def child() -> None:
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        # Taken by a thread that lives on, since a lock of this one's own would be free for it in any case.
        free = list[bool]()
        thread = threading.Thread(target=lambda: free.append(threads.EXPLAINING.acquire(timeout=LIMIT)))
        thread.start()
        thread.join()
        os._exit(int(hooks != 1 or free != [True]))

    handle = model.embeddings.register_forward_hook(slow)
    with elsewhere(lambda: NormAttribution(model).attribute(IDS)) as result:
        assert inside.wait(LIMIT)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(LIMIT)
        assert process.exitcode == 0
        assert result().isfinite().all()
    handle.remove()


def test_part_of_a_model_that_another_shares_waits_too() -> None:
    whole = classifier()
    bert, inside, over = whole.bert, threading.Event(), threading.Event()
    order: list[str] = []

    def call() -> None:
        assert inside.wait(LIMIT)
        bert(IDS)
        order.append("called")

    with elsewhere(call) as result:
        with explaining(whole):
            inside.set()
            for _ in range(20):
                time.sleep(0.01)
            order.append("explained")
            over.set()
        result()
    assert order == ["explained", "called"]


def test_other_models_and_modes_that_are_no_others_hold_nobody_up() -> None:
    model, other = families.build("bert"), families.build("gpt2")
    with explaining(model), elsewhere(lambda: logits(other)) as result:
        assert torch.equal(result(), logits(other))
    with evaluating(model), elsewhere(lambda: logits(model)) as result:
        start = time.monotonic()
        result()
        assert time.monotonic() - start < LIMIT / 2


def test_other_methods() -> None:
    from captum.attr import Saliency

    model = classifier()
    expected = model(IDS).logits
    methods: Methods = {
        "value zeroing": lambda m: ValueZeroing(m).attribute(IDS),
        "saliency": lambda m: TokenAttribution(m, Saliency).attribute(IDS),
    }
    for explain in methods.values():
        with elsewhere(lambda: [logits(model) for _ in range(20)]) as result:
            for _ in range(3):
                explain(model)
            assert all(torch.equal(one, expected) for one in result())


def test_models_spread_over_devices_by_threads_are_refused() -> None:
    model = nn.DataParallel(families.build("bert"))
    model.register_forward_hook(lambda *_: None)  # so the model inside is not the whole
    model.device_ids = [0, 1]
    with pytest.raises(UnsupportedModelError, match="DataParallel runs BertModel on 2 devices"):
        NormAttribution(model).attribute({"input_ids": IDS})
