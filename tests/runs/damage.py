"""What can happen to the files of a run that was killed: damage that is drawn from a seeded generator."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], object]
"""Does something to the folder of a run."""


def files(folder: Path) -> list[Path]:
    """Those with content: job and blocks."""
    return sorted(path for path in folder.iterdir() if path.stat().st_size)


def _flipped(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _other_digit(content: bytes, rng: random.Random) -> bytes:
    places = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    place = rng.choice(places)
    digit = rng.choice([digit for digit in b"0123456789" if digit != content[place]])
    return content[:place] + bytes([digit]) + content[place + 1 :]


CONTENTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda content, rng: content[: rng.randrange(len(content))],
    "empty": lambda _, __: b"",
    "flipped": _flipped,
    "other digit": _other_digit,
    "longer": lambda content, rng: content + rng.choice([b"\n", b"0", content, rng.randbytes(50)]),
    "binary": lambda content, rng: rng.randbytes(len(content)),
    "zeros": lambda content, _: bytes(len(content)),
    "line ends": lambda content, _: content.replace(b"\n", b"\r\n"),
    "without its first line": lambda content, _: content.partition(b"\n")[2],
}
"""New content for old."""


def _deep(told: Any, _: random.Random) -> str:
    return json.dumps(told).replace("{", '{"deep": ' + "[" * 100_000 + "]" * 100_000 + ", ", 1)


def _other_type(told: Any, rng: random.Random) -> str:
    return json.dumps(told | {rng.choice(list(told)): rng.choice([None, [], {}, "1", -1, 1.5, True, [[1]]])})


JSONS: dict[str, Callable[[Any, random.Random], str]] = {
    "deep": _deep,
    "huge number": lambda told, rng: json.dumps(told | {rng.choice(list(told)): 0}).replace(" 0", " " + "9" * 5000, 1),
    "no number": lambda told, rng: json.dumps(told | {rng.choice(list(told)): float("nan")}),
    "other type": _other_type,
    "missing": lambda told, rng: json.dumps({key: told[key] for key in told if key != rng.choice(list(told))}),
    "twice": lambda told, _: json.dumps(told)[:-1] + "," + json.dumps(told)[1:],
    "a list": lambda told, _: json.dumps([told]),
    "nothing": lambda _, __: "null",
    "other spaces": lambda told, _: json.dumps(told, separators=(",", ":")),
}
"""New JSON for old, in a job."""


def _replaced(put: Callable[[Path], object]) -> Damage:
    def place(folder: Path, rng: random.Random) -> None:
        path = rng.choice(files(folder))
        path.unlink()
        put(path)

    return place


def _link_elsewhere(path: Path) -> None:
    other = path.parents[1] / "elsewhere"
    other.write_text("of the user\n", encoding="utf-8")
    path.symlink_to(other)


def _swap(folder: Path, rng: random.Random) -> None:
    one, other = rng.sample(files(folder), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _piped_lock(folder: Path, _: random.Random) -> None:
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")


def _job_of_another(folder: Path, rng: random.Random) -> None:
    path = folder / "job.json"
    path.write_text(json.dumps({"format": rng.randrange(3), "job": {"name": "nightly"}}), encoding="utf-8")


def _folder_replaced(put: Callable[[Path], object]) -> Damage:
    def place(folder: Path, _: random.Random) -> None:
        shutil.rmtree(folder)
        put(folder)

    return place


def _linked_folder(folder: Path, _: random.Random) -> None:
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(folder.with_name("moved"))


def _strange_folder(folder: Path) -> None:
    (folder / "inner").mkdir(parents=True)
    (folder / "thesis.txt").write_text("of the user\n", encoding="utf-8")


PLACES: dict[str, Damage] = {
    "file removed": _replaced(lambda _: None),
    "folder for a file": _replaced(lambda path: (path / "inner").mkdir(parents=True)),
    "link to nothing": _replaced(lambda path: path.symlink_to("nowhere")),
    "link to itself": _replaced(lambda path: path.symlink_to(path)),
    "link to a file": _replaced(_link_elsewhere),
    "endless device": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "pipe for a file": _replaced(os.mkfifo),
    "pipe for the lock": _piped_lock,
    "two exchanged": _swap,
    "job of another program": _job_of_another,
    "another file": lambda folder, _: (folder / "notes.txt").write_text("of the user\n"),
    "torn file": lambda folder, rng: (folder / f".block-000000002.{rng.randrange(9)}.tmp").write_bytes(b"0"),
    "block too many": lambda folder, _: shutil.copy(files(folder)[0], folder / "block-000000077"),
    "file for the folder": _folder_replaced(lambda path: path.write_text("of the user\n", encoding="utf-8")),
    "pipe for the folder": _folder_replaced(os.mkfifo),
    "link to no folder": _folder_replaced(lambda path: path.symlink_to("nowhere")),
    "folder of the user": _folder_replaced(_strange_folder),
    "link to the folder": _linked_folder,
    "empty folder": _folder_replaced(Path.mkdir),
}
"""What is where a file or the folder was."""


def damages() -> Iterator[tuple[str, Damage]]:
    """All of them by name, each with what does it to a folder."""
    for name, change in CONTENTS.items():

        def content(folder: Path, rng: random.Random, change: Callable[[bytes, random.Random], bytes] = change) -> None:
            path = rng.choice(files(folder))
            path.write_bytes(change(path.read_bytes(), rng))

        yield name, content
    for name, write in JSONS.items():

        def job(folder: Path, rng: random.Random, write: Callable[[Any, random.Random], str] = write) -> None:
            path = folder / "job.json"
            told = json.loads(path.read_bytes())
            inner = rng.random() < 0.5
            text = write(told["job"] if inner else told, rng)
            path.write_text(json.dumps(told | {"job": None}).replace("null", text) if inner else text, encoding="utf-8")

        yield f"job: {name}", job
    yield from PLACES.items()


def tree(folder: Path) -> dict[str, object]:
    """What there is: of each path its kind and content; large files are known by their size."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes() if status.st_size < 1 << 24 else status.st_size
        found[str(path.relative_to(folder))] = (status.st_mode, content)
    return found
