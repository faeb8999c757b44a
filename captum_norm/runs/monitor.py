"""Shows how far a job is: in a progress bar, in the status that others can read, and in a log."""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from captum_norm import bars
from captum_norm.errors import InvalidInputError
from captum_norm.runs.blocks import Block
from captum_norm.runs.job import Job, Step
from captum_norm.runs.journal import Journal

if TYPE_CHECKING:
    from tqdm import tqdm

STATUS_SECONDS = 5.0
"""The interval at which the status is saved and logged."""


class Monitor:
    """Counts what is done of a job, and shows it in the bar; ``report`` is called with messages for the user."""

    def __init__(
        self, job: Job[Any], journal: Journal, log: Path | None, report: Callable[[str], None], bar: "tqdm[Never]"
    ) -> None:
        self.job, self.journal, self.report, self._log, self._bar = job, journal, report, log, bar
        self.workers = 1
        self.blocks = self.texts = self.retries = self.set_aside = 0
        self._handed = self._fresh = 0
        self._counts = Counter[str]()
        self._start = self._shown = time.monotonic()
        self._first: float | None = None

    def handed(self, block: Block) -> None:
        """A block was found and handed to a worker."""
        self._first = time.monotonic() if self._first is None else self._first  # workers take a while to load the job
        self._handed += block.texts
        if block.share:
            self._bar.total = round(self._handed / block.share)

    def done(self, block: Block, step: Step) -> None:
        """A block is finished."""
        self.blocks += 1
        self.texts += block.texts
        self._fresh += block.texts if step.fresh else 0
        self._counts.update(self.job.counts(step.notes))
        for message in step.messages:
            self.report(message)
        bars.advance(self._bar, block.texts, fresh=step.fresh)
        self.tick()

    def retry(self, what: str, reason: str) -> None:
        """A worker died, and what it did is begun again."""
        self.retries += 1
        self.event("retry", what=what, reason=reason)

    def tick(self) -> None:
        """Refresh what is shown, and every few seconds what is stored."""
        shown: dict[str, int] = dict(self._counts)
        if self.workers != 1:
            shown |= {"workers": self.workers, "retries": self.retries}
        self._bar.set_postfix(shown, refresh=False)
        if time.monotonic() - self._shown >= STATUS_SECONDS:
            self._shown = time.monotonic()
            status = self.status()
            self.journal.write_status(status)
            self.event("progress", **status)

    def status(self) -> dict[str, Any]:
        """How far the job is."""
        now = time.monotonic()
        working = 0.0 if self._first is None else now - self._first
        speed = self._fresh / working if working else 0.0
        total = self._bar.total
        return {
            "job": self.job.title,
            "unit": self.job.unit,
            "blocks": self.blocks,
            "texts": self.texts,
            "estimated_texts": total,
            "texts_per_second": round(speed, 3),
            "seconds": round(now - self._start, 1),
            "seconds_left": round((total - self.texts) / speed) if total and speed else None,
            "workers": self.workers,
            "retries": self.retries,
            "blocks_set_aside": self.set_aside,
            "counts": dict(self._counts),
            "host": socket.gethostname(),
            "time": time.time(),
        }

    def event(self, name: str, **facts: Any) -> None:
        """Append an event to the log; raises InvalidInputError if it cannot be written."""
        if self._log is None:
            return
        try:
            # Names that are not Unicode become escapes of JSON.
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{json.dumps({'event': name, 'time': time.time(), **facts}, ensure_ascii=False)}\n")
        except OSError as error:
            raise InvalidInputError(f"cannot write the log {self._log}: {error.strerror or error}") from error


def describe(status: Mapping[str, Any]) -> str:
    """Describe the status of a job in a line."""
    unit, total, left = status["unit"], status["estimated_texts"], status["seconds_left"]
    of = f" of about {total:,}" if total else ""
    parts = [
        f"{status['texts']:,}{of} {unit} in {status['blocks']:,} blocks",
        f"{status['texts_per_second']:,.0f} {unit}/s",
        f"{status['workers']} worker{'s' * (status['workers'] != 1)}",
        f"{status['retries']} retries",
        *(f"{number:,} {name}" for name, number in status["counts"].items()),
    ]
    if status["blocks_set_aside"]:
        parts.append(f"{status['blocks_set_aside']:,} blocks set aside")
    if left is not None:
        parts.append(f"about {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
    return f"{', '.join(parts)}; {max(0, time.time() - status['time']):.0f} s ago on {status['host']}"
