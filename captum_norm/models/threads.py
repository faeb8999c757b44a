"""Lets one thread at a time change a model to explain it; other threads' calls of it wait until it is as it was.

Hooks, modes, configurations and forward functions are all threads'. So a call that another thread is in comes to its
end before a model is changed, and one that begins meanwhile waits. Who waits for a thread that is itself blocked goes
on after a while, since it may be the one that the other waits for; such a call finds the model's own functions, too.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

EXPLAINING = threading.RLock()
"""Held by the thread that explains."""

PATIENCE = 2.0
"""A thread that has not moved for so many seconds counts as blocked."""
_PAUSE = 0.002
_CALL = nn.Module._call_impl.__code__


@dataclass(eq=False)
class _Change:
    """A model that a thread changes for a while.

    Attributes:
        modules: those of the model.
        thread: the one that explains it.
        over: set when the model is as it was.
        waiting: the threads whose calls wait for that.
    """

    modules: frozenset[nn.Module]
    thread: int
    over: threading.Event = field(default_factory=threading.Event)
    waiting: set[int] = field(default_factory=set)

    def gate(self, *_: Any) -> None:
        """A hook before the call of a module."""
        me = threading.get_ident()
        # The innermost call is the one that begins here.
        if me == self.thread or self.over.is_set() or _calls(sys._getframe(), self.modules) > 1:
            return
        watch = _Watch(self.thread)
        self.waiting.add(me)
        while not self.over.wait(PATIENCE / 8) and not watch.is_blocked():
            pass
        self.waiting.discard(me)

    def begin(self) -> None:
        """Wait until no other thread is in a call of the model."""
        watches: dict[int, _Watch] = {}
        while True:
            inside = [thread for thread, frame in sys._current_frames().items() if self._is_inside(thread, frame)]
            if all(watches.setdefault(thread, _Watch(thread)).is_blocked() for thread in inside):
                return
            time.sleep(_PAUSE)

    def _is_inside(self, thread: int, frame: FrameType) -> bool:
        if thread == self.thread or thread in self.waiting:
            return False
        return _calls(frame, self.modules) > 0


class _Watch:
    """Whether a thread moves."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._place: tuple[FrameType, int] | None = None
        self._since, self._worked = time.monotonic(), 0.0

    def is_blocked(self) -> bool:
        """Whether it has been at one place for long without computing there."""
        frame = sys._current_frames().get(self._thread)
        place = None if frame is None else (frame, frame.f_lasti)
        now, worked = time.monotonic(), _worked(self._thread)
        if place != self._place or worked - self._worked > PATIENCE / 8:
            self._place, self._since, self._worked = place, now, worked
        return now - self._since > PATIENCE


def _worked(thread: int) -> float:
    """How long a thread has computed, in seconds; 0 where the system does not tell."""
    number = next((found.native_id for found in threading.enumerate() if found.ident == thread), None)
    if number is None or sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime((~number << 3) | 6)  # CPUCLOCK_SCHED of one thread
    except OSError:
        return 0.0


_changes: list[_Change] = []

# A fork waits until no model is changed: its child has no thread that would restore it or give the lock up.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=EXPLAINING.acquire, after_in_parent=EXPLAINING.release, after_in_child=EXPLAINING.release
    )


@contextmanager
def explaining(model: nn.Module) -> Iterator[None]:
    """While open, this thread may change the model. Threads that explain any model, or call this one, wait."""
    with EXPLAINING:
        if any(model in change.modules for change in _changes):
            yield
            return
        change = _Change(frozenset(model.modules()), threading.get_ident())
        with ExitStack() as stack:
            # Also where the wait for others is interrupted; behind it no call waits any more.
            stack.callback(change.over.set)
            for part in _parts(model):
                stack.callback(part.register_forward_pre_hook(change.gate, prepend=True).remove)
            change.begin()
            _changes.append(change)
            try:
                yield
            finally:
                _changes.remove(change)


def here(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that this thread's calls alone run into; any others may, once it is removed, bring fewer arguments."""
    thread = threading.get_ident()
    return lambda *seen: hook(*seen) if threading.get_ident() == thread else None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A model and those of its parts that are called by themselves: all that are above the lists of its layers."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList) and next(child.children(), None) is not None:
            yield from _parts(child)


def _calls(frame: FrameType | None, modules: Collection[nn.Module]) -> int:
    """How many calls of modules of a model are in a stack of frames."""
    count = 0
    while frame is not None:
        count += frame.f_code is _CALL and frame.f_locals.get("self") in modules
        frame = frame.f_back
    return count
