"""Files damaged in thousands of ways, from a seed; and bounds on the time and memory that reading one may take.

``CAPTUM_NORM_FUZZ=40`` in the environment, as ``make fuzz`` sets it, draws 40 times as many cases.
"""

import codecs
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

FACTOR = int(os.environ.get("CAPTUM_NORM_FUZZ", "1"))
"""How many times as many cases as usual are drawn."""

SECONDS = 5.0
"""How much processor time one read may take."""

MEBIBYTES = 300
"""By how much all reads of a test may raise the most memory that the process ever held."""

Mutation = Callable[[random.Random, bytes], bytes]

_NUMBER = re.compile(rb"\d+")
_INSERTED = [
    *(bytes([code]) for code in (0, 1, 8, 9, 10, 12, 13, 26, 27, 32, 127, 128, 255)),
    *(text.encode() for text in ("\u0085", "\u00a0", "\u2028", "\u2029", "\u202e", "\ufeff", "\uffff", "é", "²", "٣")),
    b"\r\n", b"\xed\xa0\x80", b"\xff\xfe", b"\x1b[31m", b"\xf4\x90\x80\x80",
    *(b"-", b"p", b":", b"|||", b" ||| ", b"#", b'"', b"'", b"[", b"{", b"}", b"]", b"=", b",", b"</w>"),
    b"@@", "\u2581".encode(), b"#version: 0.2\n", b"#version: 9\n", b"#version:\n", b"null", b"NaN", b"[[a]]\n",
]  # fmt: skip
_NUMBERS = [
    *(b"0", b"1", b"2", b"7", b"-1", b"-0", b"00", b"255", b"65536", b"999999999", b"1000000000", b"4294967296"),
    *(b"9223372036854775808", b"1" * 40, b"1e999", b"-Infinity", b"0.5", b"1_000", b"0x10", "٣".encode(), "²".encode()),
    *(b"9" * digits for digits in (4300, 4301)),
]
_HUGE = [b"9" * 10**6, b"a" * 10**6, b"[" * 10**5, b'{"a":' * 10**5, b"a." * 10**4, b"\n" * 10**5, b"0-0 " * 10**5]
_RARE = 0.01


def damaged(files: Sequence[bytes], count: int, seed: int = 0) -> Iterator[bytes]:
    """``FACTOR`` times ``count`` contents, each that of one of the ``files`` with one to three kinds of damage."""
    draw = random.Random(seed)
    yield b""
    for _ in range(count * FACTOR - 1):
        content = draw.choice(files)
        for mutation in draw.choices(_MUTATIONS, k=draw.choice((1, 1, 2, 3))):
            content = mutation(draw, content)
        yield content


def put(path: Path, content: bytes) -> None:
    """Writes a file anew; ext4 waits for the disk after a file that is cut to nothing and written again."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@contextmanager
def bounded(mebibytes: int = MEBIBYTES) -> Iterator[None]:
    """Fails if the memory of the process grows by more at any time within the context; on Linux alone it is known."""
    before = _reset_peak()
    yield
    grown = _peak() - before
    assert grown <= mebibytes, f"{grown} MiB more were taken"


@contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Ends what takes more processor time; what catches every Exception cannot hold it up."""

    def stop(_: int, __: FrameType | None) -> None:
        raise HangError(f"not done after {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def at_line(number: int, call: Callable[[], Any], roots: tuple[str, ...]) -> tuple[Any, int]:
    """What the call returns, 130 if it is interrupted at the n-th line of files there, and how many lines were left."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(roots):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        return call(), left
    except KeyboardInterrupt:
        return 130, left
    finally:
        sys.settrace(None)


class HangError(BaseException):
    """Reading a file takes too long."""


def _peak() -> int:
    """The most memory that the process held since the last reset, in MiB."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(match[1]) // 1024 if match else 0


def _reset_peak() -> int:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _span(draw: random.Random, content: bytes) -> tuple[int, int]:
    start = draw.randrange(len(content) + 1)
    return start, min(len(content), start + draw.choice((1, 1, 2, 4, 8, 16, 64)))


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _delete(draw: random.Random, content: bytes) -> bytes:
    start, end = _span(draw, content)
    return content[:start] + content[end:]


def _repeat(draw: random.Random, content: bytes) -> bytes:
    start, end = _span(draw, content)
    return content[:end] + content[start:end] * draw.choice((1, 1, 2, 10, 100)) + content[end:]


def _exchange(draw: random.Random, content: bytes) -> bytes:
    (a, b), (c, d) = sorted((_span(draw, content), _span(draw, content)))
    return content if c < b else content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def _insert(draw: random.Random, content: bytes) -> bytes:
    place = draw.randrange(len(content) + 1)
    return content[:place] + draw.choice(_HUGE if draw.random() < _RARE else _INSERTED) + content[place:]


def _number(draw: random.Random, content: bytes) -> bytes:
    found = list(_NUMBER.finditer(content))
    if not found:
        return _insert(draw, content)
    match = draw.choice(found)
    return content[: match.start()] + draw.choice(_NUMBERS) + content[match.end() :]


def _lines(draw: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            del lines[one]
        case 1:
            lines.insert(one, lines[other])
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case 3:
            lines[one] = lines[one].rstrip(b"\r\n")
        case _:
            lines[one] = b"\n"
    return b"".join(lines)


def _encode(draw: random.Random, content: bytes) -> bytes:
    match draw.randrange(5):
        case 0:
            return codecs.BOM_UTF8 + content
        case 1:
            return content.replace(b"\n", b"\r\n")
        case 2:
            return content.replace(b"\n", b"\r")
        case encoding:
            return content.decode("utf-8", "replace").encode("utf-16" if encoding == 3 else "utf-16-le")


_MUTATIONS: list[Mutation] = [
    *(_flip, _flip, _cut, _delete, _repeat, _exchange, _insert, _insert, _number, _number, _lines, _encode)
]
