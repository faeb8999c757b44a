"""Minimal pairs whose evidence is known: which methods rank the word that decides between two continuations.

The pairs are those of eleven paradigms of BLiMP and of sentences on two people who give and receive (IOI), each with
the word that tells the right continuation from the wrong one, in a zip of CSV files with the columns
``one_prefix_prefix``, ``one_prefix_word_good``, ``one_prefix_word_bad`` and ``target`` [Ferrando et al. 2023].
"""

import csv
import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.kept import Content, Methods, Opener, kept, kept_methods, made, passes, refusals, table
from benchmarks.ranking import half_interval, reciprocal_rank, with_interval
from captum_norm import Difference, compare

SAMPLE = 200
"""How many pairs of a paradigm are asked."""
KNOWN = 0.7
"""Share of right pairs above which the model knows a paradigm."""
LAST, FIRST, CHANCE = "last word first", "first word first", "random order"
"""Rankings that read nothing."""
WORD = "Ġ"
"""How a byte-level token begins that begins a word."""
MARKS = ".,;:!?"


@dataclass(frozen=True)
class Pair:
    """A beginning, two continuations as the tokens in which they first differ, and the word that decides.

    Attributes:
        paradigm: its paradigm.
        prefix: the beginning.
        right: the first token of the right continuation.
        wrong: that of the wrong one.
        evidence: the places of the deciding word in the prefix.
    """

    paradigm: str
    prefix: str
    right: int
    wrong: int
    evidence: tuple[int, ...]


def places_of(evidence: str, prefix: str) -> tuple[int, ...]:
    """Return the places of a word among those of a prefix, punctuation aside; none if it is not there.

    Example:
        >>> places_of("Ann", "Ann and Bob met. Ann, who")
        (0, 4)
    """
    return tuple(place for place, word in enumerate(prefix.split()) if word.strip(MARKS) == evidence)


def read(archive: Path) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    """Yield the paradigms of an archive and their rows."""
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            if name.endswith(".csv"):
                text = io.StringIO(files.read(name).decode("utf-8"))
                yield Path(name).stem.replace("_", " ").replace("ioi dataset", "IOI"), list(csv.DictReader(text))


def pairs_of(paradigm: str, rows: Sequence[Mapping[str, str]], tokenizer: Any) -> tuple[list[Pair], dict[str, int]]:
    """Return the pairs that can be asked, and how many cannot, by reason."""
    pairs, left = [], {"one word": 0, "no evidence": 0, "same token": 0}
    for row in rows:
        prefix = row["one_prefix_prefix"]
        evidence = places_of(row["target"], prefix)
        right, wrong = (
            tokenizer(row[f"one_prefix_word_{kind}"], add_special_tokens=False)["input_ids"][0]
            for kind in ("good", "bad")
        )
        if len(prefix.split()) < 2:
            left["one word"] += 1
        elif not evidence:
            left["no evidence"] += 1
        elif right == wrong:
            left["same token"] += 1
        else:
            pairs.append(Pair(paradigm, prefix, right, wrong, evidence))
    return pairs, left


@torch.no_grad()
def known(model: Any, tokenizer: Any, pairs: Sequence[Pair], size: int = 100) -> list[bool]:
    """Return for each pair whether the model prefers the right continuation."""
    found = []
    for first in range(0, len(pairs), size):
        part = pairs[first : first + size]
        inputs = encoded(part, tokenizer, model.device)
        rows, last = torch.arange(len(part)), inputs["attention_mask"].sum(1) - 1
        logits = model(**inputs).logits[rows, last].cpu()
        right, wrong = (torch.tensor([getattr(pair, kind) for pair in part]) for kind in ("right", "wrong"))
        found += (logits[rows, right] > logits[rows, wrong]).tolist()
    return found


def encoded(pairs: Sequence[Pair], tokenizer: Any, device: Any) -> dict[str, Any]:
    """Tokenize the prefixes, each after the start token."""
    inputs = dict(tokenizer([pair.prefix for pair in pairs], padding=True, return_tensors="pt").to(device))
    inputs.pop("token_type_ids", None)
    return inputs


def chosen(open_model: Opener, archive: Path) -> str:
    """Choose pairs that the model gets right, as JSON."""
    model, tokenizer = open_model()
    paradigms, explained = [], []
    for paradigm, rows in read(archive):
        pairs, left = pairs_of(paradigm, rows, tokenizer)
        random.Random(0).shuffle(pairs)
        pairs = pairs[:SAMPLE]
        right = known(model, tokenizer, pairs)
        share = sum(right) / len(right)
        paradigms.append({"paradigm": paradigm, "asked": len(pairs), "right": share, **left})
        explained += [asdict(pair) for pair, knows in zip(pairs, right, strict=True) if knows]
    content = {"layers": model.config.n_layer, "paradigms": paradigms, "pairs": explained}
    return json.dumps(content, ensure_ascii=False)


def first_of_each(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """Return at most so many pairs of each paradigm."""
    counts: Counter[str] = Counter()
    found = []
    for pair in pairs:
        counts[pair.paradigm] += 1
        if counts[pair.paradigm] <= most:
            found.append(pair)
    return found


def compared(open_model: Opener, pairs: Sequence[Pair], methods: Methods) -> str:
    """Compare methods on the logit of the right continuation minus that of the wrong one, as JSON."""
    model, tokenizer = open_model()
    target = Difference([pair.right for pair in pairs], [pair.wrong for pair in pairs])
    inputs = encoded(pairs, tokenizer, model.device)
    options: Any = {"target": target, "removal": "mean", "methods": made(methods, model, tokenizer)}
    return compare(model, inputs, tokenizer=tokenizer, **options).file_bytes(".json").decode()


def by_word(tokens: Sequence[str], scores: Sequence[float]) -> list[float]:
    """Sum the scores of tokens by word.

    Example:
        >>> by_word(["Ġthe", "Ġneph", "ews"], [0.25, 0.5, 1.0])
        [0.25, 1.5]
    """
    words: list[float] = []
    for token, score in zip(tokens, scores, strict=True):
        if token.startswith(WORD):
            words.append(0.0)
        words[-1] += score
    return words


def ranks(comparison: Content, pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Return, per method and ranking that reads nothing, the reciprocal rank of each pair's evidence."""
    rows: list[list[Content]] = [[] for _ in pairs]
    for row in comparison["scores"]:
        if row["removable"]:  # the start token is no word
            rows[row["example"]].append(row)
    names = [row["method"] for row in comparison["methods"] if row["refused"] is None]
    found: dict[str, list[float]] = {name: [] for name in (*names, LAST, FIRST, CHANCE)}
    for pair, tokens in zip(pairs, rows, strict=True):
        texts, count = [row["token"] for row in tokens], len(pair.prefix.split())
        scores = {name: by_word(texts, [row[name] for row in tokens]) for name in names}
        scores |= {LAST: list(range(count)), FIRST: list(range(count, 0, -1)), CHANCE: [0.0] * count}
        for name, words in scores.items():
            if len(words) != count:
                raise ValueError(f"got {len(words)} words for {count} in {pair.prefix!r}")
            found[name].append(reciprocal_rank(words, pair.evidence))
    return found


def results(work: Path, open_model: Opener, archive: Path, most: int, groups: Sequence[Methods]) -> Content:
    """Return the pairs, the comparison and the reciprocal ranks, from files in ``work`` where these are kept."""
    content = kept(work / "evidence-pairs.json", lambda: chosen(open_model, archive))
    every = [Pair(**entry | {"evidence": tuple(entry["evidence"])}) for entry in content["pairs"]]
    pairs = first_of_each(every, most)
    comparison: Content = {}
    for methods in groups:
        comparison = kept_methods(work / "evidence.json", methods, partial(compared, open_model, pairs))
    return {**content, "pairs": pairs, "comparison": comparison, "ranks": ranks(comparison, pairs)}


def shares(content: Content, *, well: bool) -> dict[str, list[float]]:
    """Return the reciprocal ranks in the paradigms that the model knows, or in the others."""
    those = {entry["paradigm"] for entry in content["paradigms"] if (entry["right"] > KNOWN) is well}
    return {
        name: [value for pair, value in zip(content["pairs"], values, strict=True) if pair.paradigm in those]
        for name, values in content["ranks"].items()
    }


def by_rank(content: Content) -> list[str]:
    """Return the methods by descending mean reciprocal rank in the paradigms that the model knows."""
    well = shares(content, well=True)
    return sorted(well, key=lambda name: -mean(well[name] or [0]))


def sections(content: Content) -> list[str]:
    """Return the sections of the page."""
    what = (
        f"A GPT-2 of {content['layers']} layers, trained from scratch (`benchmarks.language_model`), reads a sentence "
        "up to the word that must agree with an earlier one, the evidence: *The **niece** of most guests* — *is*, not "
        "*are*. Eleven paradigms of BLiMP and indirect objects (IOI), with the evidence of Ferrando et al. [2023]. "
        "Explained is the logit of the right word minus that of the wrong one, in pairs that the model gets right. "
        "Left out are pairs whose words begin with the same token, whose evidence is not in the prefix, or whose "
        f"prefix is one word; of the others {SAMPLE} are asked:"
    )
    measured = (
        "A word's score is the sum of its tokens' scores, and the highest score ranks first: of signed scores the "
        "word that speaks most for the right continuation, of norms and weights the largest. The start token is no "
        "word. If the evidence stands there twice, the better rank counts, and ties count as if broken at random. "
        "MRR is the mean of 1 / rank of the evidence, ± half the 95 % bootstrap interval; *known* are the paradigms "
        f"of which the model gets more than {KNOWN:.0%} right. Gain is the faithfulness of the single tokens on the "
        "same pairs, removed tokens becoming the mean embedding. Passes: the time taken, in forward passes over the "
        "same batches."
    )
    caution = (
        "Where the evidence stands is not left to chance: before nouns it is the last word, in anaphora the first. "
        "Rankings by position alone show what that is worth, and a high MRR in one paradigm may be no more than that; "
        f"look for methods above {LAST} and {FIRST} in all. The last row has the largest half interval of each column."
    )
    title = "## The word that decides: BLiMP and IOI"
    return [title, what, asked(content), measured, overview(content), "### By paradigm", caution, by_paradigm(content)]


def asked(content: Content) -> str:
    """Return the table of paradigms."""
    explained = Counter(pair.paradigm for pair in content["pairs"])
    rows = [
        [
            entry["paradigm"],
            *(str(entry[reason]) for reason in ("same token", "no evidence", "one word", "asked")),
            f"{entry['right']:.0%}",
            str(explained[entry["paradigm"]]),
        ]
        for entry in ordered(content)
    ]
    header = ["paradigm", "same first token", "no evidence", "one word", "asked", "right", "explained"]
    return table(header, rows)


def ordered(content: Content) -> list[Content]:
    """Return the paradigms, best known ones first."""
    return sorted(content["paradigms"], key=lambda entry: -entry["right"])


def overview(content: Content) -> str:
    """Return the table of methods, with cost and faithfulness."""
    well, other = shares(content, well=True), shares(content, well=False)
    measures = {row["method"]: row for row in content["comparison"]["methods"] if row["refused"] is None}
    rows = []
    for name in by_rank(content):
        row = measures.get(name)
        cost, gain = ("–", "–") if row is None else (passes(row), f"{row['relevance_gain']:.2f}")
        rows.append([name, cost, with_interval(well[name]), with_interval(other[name]), gain])
    header = ["", "passes", "MRR, known ↑", "MRR, others ↑", "gain ↑"]
    return "\n\n".join([table(header, rows), *refusals(content["comparison"])])


def by_paradigm(content: Content) -> str:
    """Return the table of methods and paradigms."""
    paradigms = [entry["paradigm"] for entry in ordered(content)]
    measures = {row["method"]: row for row in content["comparison"]["methods"]}
    values = {
        (name, paradigm): [
            value for pair, value in zip(content["pairs"], found, strict=True) if pair.paradigm == paradigm
        ]
        for name, found in content["ranks"].items()
        for paradigm in paradigms
    }
    rows = [
        [
            name,
            passes(measures[name]) if name in measures else "–",
            *(f"{mean(values[name, paradigm]):.2f}" for paradigm in paradigms),
        ]
        for name in by_rank(content)
    ]
    widest = [max(half_interval(values[name, paradigm]) for name in content["ranks"]) for paradigm in paradigms]
    header = ["MRR ↑", "passes", *(f"{entry['paradigm']} ({entry['right']:.0%})" for entry in ordered(content))]
    return table(header, [*rows, ["±, at most", "", *(f"{value:.2f}" for value in widest)]])
