"""Prompts whose truth is known: twenty generated passages, one of which holds the answer to a question.

Each passage says what one person found, owns or lives by; the question names the person, and the answer repeats the
passage word by word. Names and facts are drawn anew for each prompt, so nothing but the passage can tell the answer.
:func:`training_documents` draws the text that teaches a language model to answer (:mod:`benchmarks.language_model`).
"""

import random
from collections.abc import Iterator
from typing import NamedTuple


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
    Adam Agnes Albert Alice Amy Andrew Anna Anthony Arthur Barbara Beatrice Benjamin Bernard Brenda Carl Carol
    Catherine Charles Clara Daniel David Deborah Denise Derek Diana Donald Edward Elena Elizabeth Emily Eric
    Ernest Esther Eva Felix Frances Frank Gabriel George Gerald Gina Gloria Gordon Grace Hannah Harold Heather
    Helen Henry Holly Irene Jack Jacob James Jane Janet Jason Jean Jennifer Joan Joel John Joseph Joyce Judith
    Julia Julian Karen Kathleen Keith Kenneth Laura Lawrence Leonard Leslie Linda Lisa Louis Lucy Margaret Maria
    Mark Martha Martin Mary Matthew Michael Monica Nancy Natalie Nicholas Nicole Nina Noah Nora Oliver Oscar
    Patricia Paul Paula Peter Philip Rachel Ralph Raymond Rebecca Renee Richard Robert Rose Russell Ruth Samuel
    Sandra Sarah Scott Sharon Simon Sonia Stephen Steven Susan Sylvia Tanya Teresa Thomas Timothy Tina Victor
    Vincent Virginia Walter Wendy William
""")
SIZES = _words("big small tiny large heavy light strange new broken clean")
COLOURS = _words("red blue green yellow white black brown grey golden silver")
THINGS = _words("""
    bicycle box lamp chair table clock coat hat map ring spoon basket bottle mirror piano guitar drum carpet
    candle hammer ladder rope shield sword boat wagon statue painting kettle barrel
""")
PLACES = _words("""
    garden kitchen cellar forest market station library museum harbour church school office park river valley
    tower bridge castle village field
""")
JOBS = _words("""
    baker doctor teacher farmer lawyer painter driver soldier nurse writer singer fisherman gardener carpenter
    tailor judge pilot miner priest sailor
""")
CITIES = _words("""
    London Paris Rome Madrid Lisbon Berlin Vienna Prague Warsaw Athens Dublin Brussels Oslo Helsinki Stockholm
    Copenhagen Budapest Geneva Hamburg Milan
""")

FACTS = (
    ("found a {size} {colour} {thing} in the {place}", "What did {name} find?"),
    ("owns a {size} {colour} {thing} and keeps it in the {place}", "What does {name} own?"),
    ("works as a {job} near the {place} of {city}", "What does {name} do?"),
    ("lives in {city} with a {colour} {thing} and a {job}", "Where does {name} live?"),
)  # fmt: skip
FILLERS = (
    "Nobody knows why.",
    "It was a long time ago.",
    "The neighbours talk about it.",
    "This is well known.",
    "There is more to say.",
)
HANDING_OVER = (
    "While {a} and {b} were in the {place}, {c} handed the {thing} to {d}.",
    "{a} met {b} at the {place}, and {d} passed a {colour} {thing} on to {c}.",
    "In the {place} {a} and {b} looked at a {thing}. {d} wanted to sell it to {c}.",
    "{a} and {b} worked near the {place}, and {c} gave a {thing} to {d}.",
    "After {a} and {b} had left the {place}, {d} brought a {size} {thing} to {c}.",
    "The friends {a} and {b} were at the {place}. {c} decided to lend the {thing} to {d}.",
)
"""Sentences on a and b, who are c and d in this order or the other."""


class Prompt(NamedTuple):
    """A question after its passages.

    Attributes:
        passages: The passages, in order.
        question: The question and the beginning of its answer.
        answer: What follows, with a leading space.
        right: Index of the passage that holds the answer.
    """

    passages: tuple[str, ...]
    question: str
    answer: str
    right: int

    @property
    def text(self) -> str:
        """The passages and the question, a line each."""
        return "\n".join([*self.passages, self.question])


def _drawn(template: str, draw: random.Random, **names: str) -> str:
    lists = {"size": SIZES, "colour": COLOURS, "thing": THINGS, "place": PLACES, "job": JOBS, "city": CITIES}
    return template.format(**{kind: draw.choice(words) for kind, words in lists.items()}, **names)


def _passages(draw: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Draw passages, each of another person: the passage, its question and its answer."""
    drawn = []
    for name in draw.sample(NAMES, count):
        fact, question = draw.choice(FACTS)
        told = _drawn(fact, draw)
        verb, answer = told.split(" ", 1)
        drawn.append(
            (f"{name} {told}. {draw.choice(FILLERS)}", f"{question.format(name=name)} {name} {verb}", f" {answer}.")
        )
    return drawn


def prompts(count: int, seed: int, passages: int = 20) -> Iterator[Prompt]:
    """Yield prompts of that many passages."""
    draw = random.Random(seed)
    for _ in range(count):
        drawn = _passages(draw, passages)
        right = draw.randrange(passages)
        _, question, answer = drawn[right]
        yield Prompt(tuple(passage for passage, _, _ in drawn), question, answer, right)


def _invented_name(draw: random.Random) -> str:
    """Draw a name that no text knows, which can only be copied."""
    syllables = [draw.choice("bdfgjklmnprstvz") + draw.choice("aeiou") for _ in range(draw.randint(2, 4))]
    return "".join(syllables).capitalize()


def _people(draw: random.Random, order: random.Random | None) -> str:
    """Draw a sentence on two people, one of whom receives something."""
    a, b = draw.sample(NAMES, 2) if draw.random() < 0.5 else (_invented_name(draw), _invented_name(draw))
    c, d = (a, b) if order is None else order.sample((a, b), 2)
    return _drawn(draw.choice(HANDING_OVER), draw, a=a, b=b, c=c, d=d)


def training_documents(count: int, seed: int, questions: int = 8, *, either: bool = False) -> Iterator[str]:
    """Yield documents of two kinds: passages, then questions with their answers; and sentences on two people.

    Args:
        count: how many.
        seed: of all that is drawn.
        questions: how many are asked about the passages of a document.
        either: whether either of two people may receive, so that only the name said twice tells who gives; otherwise
            their order in the sentence tells it.
    """
    draw, order = random.Random(seed), random.Random(seed) if either else None
    for _ in range(count):
        if draw.random() < 0.25:
            yield "\n".join(_people(draw, order) for _ in range(25))
        else:
            drawn = _passages(draw, draw.randint(2, 20))
            asked = [question + answer for _, question, answer in draw.choices(drawn, k=questions)]
            yield "\n".join([*(passage for passage, _, _ in drawn), *asked])
