"""Europarl, from raw text to what fairseq trains on: normalised, cut into pieces, counted and binarised.

```console
$ python -m benchmarks.translation.prepare --data europarl-en-fr --out build/translation
```
"""

import argparse
import lzma
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from alignment.normalization import Language, normalize_words, tokenize

LANGUAGES: tuple[Language, Language] = ("en", "fr")
SPLITS = ("train", "valid", "test")
LOST = "\ufffd"
TAGS = {"en": "madeupword0000", "fr": "madeupword0001"}
"""The first piece of a joint model's source, by the language of its target: padding of fairseq's dictionaries."""
COPIED = 0.25
"""How many sentences are copied per translation."""


def main() -> None:
    """Prepare the text in ``--data``; steps whose output exists already are left out."""
    arguments = _arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        texts = [out / f"{split}.{language}" for language in LANGUAGES]
        if all(text.exists() for text in texts):
            continue
        kept, seen = _normalize(arguments, split, texts)
        print(f"{split}: {kept} of {seen} pairs kept", flush=True)
    model = out / "pieces.model"
    if not model.exists():
        _learn_pieces([out / f"train.{language}" for language in LANGUAGES], model, arguments.pieces, arguments.workers)
    for split in SPLITS:
        for language in LANGUAGES:
            pieces = out / f"{split}.pieces.{language}"
            if not pieces.exists():
                _cut(out / f"{split}.{language}", pieces, model)
    if not (out / "binary").exists():
        _binarize(out, arguments.workers)
    if arguments.joint and not (out / "joint" / "binary").exists():
        _join(out, arguments.workers)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of {train,valid,test}.{en,fr}.xz")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is made here")
    parser.add_argument("--pieces", type=int, default=8000, help="size of the joint SentencePiece vocabulary")
    parser.add_argument("--max-words", type=int, default=80, help="longest sentence to train on, in normalised words")
    parser.add_argument("--max-ratio", type=float, default=3.0, help="most words of one side per word of the other")
    parser.add_argument("--joint", action="store_true", help="also mix both directions for one model")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    return parser.parse_args()


def _normalize(arguments: argparse.Namespace, split: str, texts: list[Path]) -> tuple[int, int]:
    """Write the normalised pairs of one split to ``texts``; returns how many pairs were kept, and out of how many."""
    kept = seen = 0
    with ExitStack() as stack:
        sources = [
            stack.enter_context(
                lzma.open(arguments.data / f"{split}.{language}.xz", "rt", encoding="utf-8", newline="\n")
            )
            for language in LANGUAGES
        ]
        pool = stack.enter_context(multiprocessing.Pool(arguments.workers))
        targets = [stack.enter_context(_atomic(text)) for text in texts]
        keep = partial(_pair, max_words=arguments.max_words, max_ratio=arguments.max_ratio)
        for pair in pool.imap(keep, zip(*sources, strict=True), chunksize=500):
            seen += 1
            if pair is not None:
                kept += 1
                for target, line in zip(targets, pair, strict=True):
                    target.write(f"{line}\n")
    return kept, seen


def _pair(lines: tuple[str, ...], max_words: int, max_ratio: float) -> tuple[str, ...] | None:
    """The normalised pair, or ``None`` if it is not fit to learn from: damaged, empty, too long or too uneven."""
    if any(LOST in line for line in lines):
        return None
    pair = [
        normalize_words(tokenize(line, language), language) for line, language in zip(lines, LANGUAGES, strict=True)
    ]
    shorter, longer = sorted(map(len, pair))
    if shorter == 0 or longer > max_words or longer > max_ratio * shorter:
        return None
    return tuple(" ".join(words) for words in pair)


def _learn_pieces(texts: list[Path], model: Path, size: int, workers: int) -> None:
    """Learn one BPE for both languages, whose pieces stay within words and which changes no character by itself."""
    partial_model = model.with_name(f"partial-{model.stem}")
    SentencePieceTrainer.train(
        input=",".join(map(str, texts)),
        model_prefix=str(partial_model),
        model_type="bpe",
        vocab_size=size,
        character_coverage=1.0,
        normalization_rule_name="identity",
        split_by_whitespace=True,
        byte_fallback=False,
        num_threads=workers,
        minloglevel=1,
    )
    partial_model.with_suffix(".vocab").replace(model.with_suffix(".vocab"))
    partial_model.with_suffix(".model").replace(model)


def _cut(text: Path, pieces: Path, model: Path) -> None:
    processor = SentencePieceProcessor(model_file=str(model))
    with text.open(encoding="utf-8", newline="\n") as lines, _atomic(pieces) as cut:
        for line in lines:
            cut.write(" ".join(processor.encode(line.rstrip("\n"), out_type=str)) + "\n")


def _join(out: Path, workers: int) -> None:
    """Mix both directions for one model, whose tags must be in the dictionary: fairseq would read unknown words."""
    dictionary = out / "binary" / "dict.en.txt"
    known = {line.split(" ")[0] for line in dictionary.read_text(encoding="utf-8").splitlines()}
    if missing := {*TAGS.values()} - known:
        raise SystemExit(f"{dictionary} lacks {', '.join(sorted(missing))}, a tag; give another number of --pieces")
    (out / "joint").mkdir(exist_ok=True)
    for split in SPLITS:
        _mix(out, split)
    _binarize(out / "joint", workers, dictionary, ("source", "target"))


def _mix(out: Path, split: str) -> None:
    """Write translations in both directions and, to train on, copies, whose source lacks some of the pieces."""
    generator = random.Random(1)
    texts = [(out / f"{split}.pieces.{language}").read_text(encoding="utf-8").splitlines() for language in LANGUAGES]
    pairs = list[tuple[str, str]]()
    for sides in zip(*texts, strict=True):
        for language, line, other in zip(LANGUAGES, sides, reversed(sides), strict=True):
            pairs.append((f"{TAGS[language]} {other}", line))
            if split == "train" and generator.random() < COPIED:
                kept = " ".join(piece for piece in line.split() if generator.random() < 0.9)
                pairs.append((f"{TAGS[language]} {kept}", line))
    for side, lines in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
        with _atomic(out / "joint" / f"{split}.pieces.{side}") as file:
            file.writelines(f"{line}\n" for line in lines)


def _binarize(out: Path, workers: int, dictionary: Path | None = None, sides: tuple[str, str] = LANGUAGES) -> None:
    """Have fairseq binarise and, unless one is given, count the joint dictionary; the result serves both directions."""
    unfinished = out / "partial-binary"
    command = [sys.executable, "-m", "fairseq_cli.preprocess", f"--source-lang={sides[0]}", f"--target-lang={sides[1]}"]
    command += [f"--{split}pref={out / split}.pieces" for split in SPLITS]
    command += [f"--srcdict={dictionary}"] if dictionary else []
    command += ["--joined-dictionary", f"--workers={workers}", f"--destdir={unfinished}"]
    subprocess.run(command, check=True)
    unfinished.replace(out / "binary")


@contextmanager
def _atomic(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name only once it is complete."""
    unfinished = path.with_name(f"partial-{path.name}")
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


if __name__ == "__main__":
    main()
