"""A clock that tests turn on, and work that is killed after some time."""

from types import SimpleNamespace
from typing import Any

import pytest

from captum_norm.runs import journal


class Clock:
    """Stands in for the journal's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.end, self.worked = 0.0, float("inf"), 0
        monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: self.now))

    def kill_after(self, seconds: float) -> None:
        """Ends the next work that takes longer, all of it together."""
        self.end = self.now + seconds

    def work(self, seconds: float) -> None:
        """Lets some work take its time."""
        if self.now + seconds > self.end:
            raise KeyboardInterrupt
        self.now += seconds
        self.worked += 1


def killed_after(clock: Clock, seconds: float, run: Any) -> None:
    """Runs until that time has gone."""
    clock.kill_after(seconds)
    with pytest.raises(KeyboardInterrupt):
        run()
    clock.end = float("inf")
