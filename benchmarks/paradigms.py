"""Pairs of texts that differ in what decides the next word, in six paradigms, and small models that learn these.

A :class:`Pair` has a text, a counterfactual of which one word differs, and the word that follows each. Every word is a
token of :func:`word_tokenizer`; which follows is determined by the text alone. :func:`train` trains a model on texts
of all paradigms; pairs are drawn with other seeds.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.copied_facts import COLOURS, PLACES, THINGS

START, PADDING, UNKNOWN = "<s>", "<pad>", "<unk>"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN = _words("""
    Agnes Alice Amy Anna Barbara Brenda Carol Clara Diana Emily Esther Eva Grace Hannah Helen Irene Jane Judith Karen
    Laura Linda Lucy Maria Martha Mary Nancy Nina Rachel Ruth Sarah Susan Wendy
""")
MEN = _words("""
    Adam Albert Andrew Arthur Bernard Carl Charles Daniel David Derek Edward Eric Felix Frank George Gordon Henry Jack
    James John Joseph Keith Louis Mark Martin Oscar Paul Peter Ralph Simon Thomas Walter
""")
NOUNS = (
    ("key", "keys"), ("door", "doors"), ("cabinet", "cabinets"), ("author", "authors"), ("pilot", "pilots"),
    ("teacher", "teachers"), ("picture", "pictures"), ("letter", "letters"), ("farmer", "farmers"), ("dog", "dogs"),
    ("tree", "trees"), ("house", "houses"), ("road", "roads"), ("book", "books"), ("cup", "cups"), ("ship", "ships"),
    ("nurse", "nurses"), ("horse", "horses"), ("window", "windows"), ("singer", "singers"),
)  # fmt: skip
SIZES = _words("big small tiny large heavy light strange new broken clean")
PREPOSITIONS = _words("near behind beside above under before")
GIVEN = _words("gave handed sold lent brought offered")
HURT = _words("blamed praised hurt saw described admired")
OTHERS = _words("When and went to the , While were in After left At met is are . herself himself she he")


class Pair(NamedTuple):
    """A text and its counterfactual.

    Attributes:
        paradigm: What decides the next word.
        text: The text.
        counterfactual: As many words, of which one differs.
        answer: The word that follows the text.
        other: The word that follows the counterfactual.
    """

    paradigm: str
    text: str
    counterfactual: str
    answer: str
    other: str


def indirect_object(draw: random.Random) -> Pair:
    """Who is named once receives: the counterfactual repeats the other name."""
    first, second = draw.sample(WOMEN + MEN, 2)
    beginning = draw.choice(("When {0} and {1} went to the {2} ,", "While {0} and {1} were in the {2} ,",
                             "After {0} and {1} left the {2} ,", "At the {2} {0} met {1} and"))  # fmt: skip
    gave = f"{draw.choice(GIVEN)} the {draw.choice(COLOURS)} {draw.choice(THINGS)} to"
    told = beginning.format(first, second, draw.choice(PLACES))
    this, that = draw.sample((first, second), 2)
    return Pair("indirect object", f"{told} {this} {gave}", f"{told} {that} {gave}", that, this)


def copy(draw: random.Random) -> Pair:
    """What followed a word follows it again: the counterfactual had another word there."""
    words = draw.sample(THINGS + PLACES + SIZES + COLOURS, draw.randint(6, 8))
    other = words.pop()
    first = draw.randrange(3)
    last = draw.randrange(first, len(words) - 1)
    again, answer = words[first : last + 1], words[last + 1]
    changed = [other if word == answer else word for word in words]
    return Pair("copy", " ".join(words + again), " ".join(changed + again), answer, other)


def agreement(draw: random.Random) -> Pair:
    """The subject's number decides the verb, not that of the noun before it: the counterfactual has the other."""
    subject, attractor = draw.sample(NOUNS, 2)
    number = draw.randrange(2)
    size, colour = draw.choice(SIZES), draw.choice(COLOURS)
    rest = f"{draw.choice(PREPOSITIONS)} the {colour} {draw.choice(attractor)}"
    this, that = (f"the {size} {subject[each]} {rest}" for each in (number, 1 - number))
    return Pair("agreement", this, that, *(("is", "are") if number == 0 else ("are", "is")))


def reflexive(draw: random.Random) -> Pair:
    """The subject's gender decides the pronoun, not that of the name before it: the counterfactual has the other."""
    genders = [(WOMEN, "herself"), (MEN, "himself")]
    draw.shuffle(genders)
    (names, answer), (others, other) = genders
    this, that, beside = draw.choice(names), draw.choice(others), draw.choice(WOMEN + MEN)
    while beside in (this, that):
        beside = draw.choice(WOMEN + MEN)
    rest = f"{draw.choice(PREPOSITIONS)} {beside} in the {draw.choice(PLACES)} {draw.choice(HURT)}"
    return Pair("reflexive", f"{this} {rest}", f"{that} {rest}", answer, other)


def pronoun(draw: random.Random) -> Pair:
    """A pronoun gives to the name of the other gender: the counterfactual has the other pronoun."""
    woman, man = draw.choice(WOMEN), draw.choice(MEN)
    first, second = draw.sample((woman, man), 2)
    told = f"{first} met {second} in the {draw.choice(PLACES)} and"
    gave = f"{draw.choice(GIVEN)} the {draw.choice(THINGS)} to"
    (this, answer), (that, other) = draw.sample((("she", man), ("he", woman)), 2)
    return Pair("pronoun", f"{told} {this} {gave}", f"{told} {that} {gave}", answer, other)


def colour(draw: random.Random) -> Pair:
    """A thing has the colour that it was said to have: the counterfactual asks for another thing."""
    things, colours = draw.sample(THINGS, 2), draw.sample(COLOURS, 2)
    told = " and ".join(f"the {colour} {thing}" for colour, thing in zip(colours, things, strict=True))
    told = f"{told} are in the {draw.choice(PLACES)} . the"
    asked = draw.randrange(2)
    this, that = (f"{told} {things[each]} is" for each in (asked, 1 - asked))
    return Pair("colour", this, that, colours[asked], colours[1 - asked])


PARADIGMS: Mapping[str, Callable[[random.Random], Pair]] = {
    "indirect object": indirect_object,
    "copy": copy,
    "agreement": agreement,
    "reflexive": reflexive,
    "pronoun": pronoun,
    "colour": colour,
}


def pairs(paradigm: str, count: int, seed: int) -> Iterator[Pair]:
    """Draw pairs of one paradigm."""
    draw = random.Random(f"{paradigm} {seed}")
    for _ in range(count):
        yield PARADIGMS[paradigm](draw)


def sentences(seed: int) -> Iterator[str]:
    """Draw texts of all paradigms, each with its answer, without end; copies twice as often, which take longest."""
    draw = random.Random(f"sentences {seed}")
    while True:
        pair = draw.choice([*PARADIGMS.values(), copy])(draw)
        yield f"{pair.text} {pair.answer} ."


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose every token is one of the paradigms' words; a start token begins each text."""
    lists = (WOMEN, MEN, *NOUNS, SIZES, PREPOSITIONS, GIVEN, HURT, OTHERS, COLOURS, PLACES, THINGS)
    words = dict.fromkeys([START, PADDING, UNKNOWN, *(w for each in lists for w in each)])
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    special = {"bos_token": START, "pad_token": PADDING, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def new_models(tokenizer: PreTrainedTokenizerFast) -> dict[str, PreTrainedModel]:
    """Return untrained models of two architectures: layer norms and GELU; RMS norms, gates, rotary positions."""
    both: Any = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    both["attn_implementation"] = "eager"
    dropout: Any = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    gpt2 = GPT2Config(n_positions=32, n_embd=128, n_layer=4, n_head=4, **dropout, **both)
    sizes: Any = {"hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": 32}
    llama = LlamaConfig(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, **sizes, **both)
    return {"GPT-2": GPT2LMHeadModel(gpt2), "LLaMA": LlamaForCausalLM(llama)}


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, drawn: list[Pair]) -> float:
    """Return how often the most likely next word is the answer, of both texts of each pair."""
    texts = [(pair.text, pair.answer) for pair in drawn] + [(pair.counterfactual, pair.other) for pair in drawn]
    inputs = tokenizer([text for text, _ in texts], padding=True, return_tensors="pt")
    logits = model(**inputs).logits[torch.arange(len(texts)), inputs["attention_mask"].sum(1) - 1]
    answers = torch.tensor(tokenizer.convert_tokens_to_ids([answer for _, answer in texts]))
    return float((logits.argmax(-1) == answers).float().mean())


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    steps: int = 6_000,
    size: int = 64,
    learning_rate: float = 2e-3,
    seed: int = 1,
) -> None:
    """Train a model on texts of all paradigms, and write it to a folder."""
    drawn, begun, losses = sentences(seed), time.perf_counter(), list[float]()
    optimizer = AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 200, 1 - step / steps))
    for step in range(steps):
        model.train()
        inputs = tokenizer(list(itertools.islice(drawn, size)), padding=True, return_tensors="pt")
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits
        ids, real = inputs["input_ids"], inputs["attention_mask"]
        each = cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
        answers = each[torch.arange(size), real.sum(1) - 3]  # before the full stop
        loss = each[real[:, 1:] == 1].mean() + answers.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 500 == 0:
            model.train(False)
            right = ", ".join(
                f"{name} {accuracy(model, tokenizer, list(pairs(name, 100, 0))):.2f}" for name in PARADIGMS
            )
            print(
                f"step {step + 1}, {time.perf_counter() - begun:.0f} s: loss {sum(losses) / len(losses):.3f}; {right}",
                flush=True,
            )
            losses = []
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
