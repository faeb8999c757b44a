"""Spans projected by links, and tags that go over to a translation."""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from alignment import Alignment, parse_markup, project_spans, split_text, transfer_tags
from alignment.markup import Span, Syntax, TextWord
from alignment.tags import NestedSpan, project_nested
from captum_norm import InvalidInputError
from tests.fuzzing import FACTOR, damaged, limited

Links = list[tuple[int, int]]


def crossing(span: Span, projected: Span, links: Links) -> int:
    """How many links have one word inside and the other outside."""
    return sum((span[0] <= i < span[1]) != (projected[0] <= j < projected[1]) for i, j in links)


def changing_sides(place: int, projected: int, links: Links) -> int:
    return sum((i < place) != (j < projected) for i, j in links)


def drawn(draw: random.Random, most: int = 8) -> tuple[int, int, Links]:
    """Numbers of source and target words, at least two, and links: some near the diagonal, some anywhere, or none."""
    source, target = draw.randint(2, most), draw.randint(2, most)
    count = draw.choice((0, 1, most, 2 * most))
    links = {(draw.randrange(source), draw.randrange(target)) for _ in range(count)}
    if draw.random() < 0.5:
        links = {(i, min(target - 1, max(0, i + draw.choice((-1, 0, 0, 1))))) for i, _ in links}
    return source, target, sorted(links)


def drawn_spans(draw: random.Random, first: int, last: int, depth: int = 0) -> Iterable[Span]:
    """Spans between two words, disjoint or nested, places included, in random order within each parent."""
    cuts = sorted(draw.choices(range(first, last + 1), k=2 * draw.choice((0, 1, 1, 2, 3))))
    for start, end in zip(cuts[::2], cuts[1::2], strict=True):
        yield start, end
        if start < end and depth < 4:
            yield from drawn_spans(draw, start, end, depth + 1)


@pytest.mark.fuzz
def test_a_single_span_goes_where_the_fewest_links_cross() -> None:
    draw = random.Random(0)
    checked = 0
    for _ in range(200 * FACTOR):
        source, target, links = drawn(draw, most=6)
        for span in combinations(range(source + 1), 2):
            if span == (0, source):
                continue
            [found] = project_spans([span], Alignment(links), range(source), range(target))
            costs = {other: crossing(span, other, links) for other in combinations(range(target + 1), 2)}
            inside = {word: sum(span[0] <= i < span[1] for i, j in links if j == word) for word in range(target)}
            edges = {word for word in inside if 2 * inside[word] > sum(j == word for _, j in links)}
            if edges:
                assert costs[found] == min(costs.values())
            edges = edges or {word for word in inside if inside[word]}
            candidates = [(a, b) for a, b in costs if {a, b - 1} <= edges]
            if candidates:
                assert found == min(candidates, key=lambda other: (costs[other], other[0] - other[1], other))
                checked += 1
            else:
                assert found[0] == found[1]
    assert checked > 500 * FACTOR


@pytest.mark.fuzz
def test_a_single_place_goes_where_the_fewest_links_change_sides() -> None:
    draw = random.Random(1)
    for _ in range(300 * FACTOR):
        source, target, links = drawn(draw)
        for place in range(source + 1):
            [(start, end)] = project_spans([(place, place)], Alignment(links), range(source), range(target))
            assert start == end
            if place in (0, source):
                assert start == (0 if place == 0 else target)
            else:
                least = min(changing_sides(place, other, links) for other in range(target + 1))
                assert changing_sides(place, start, links) == least


def holds(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@pytest.mark.fuzz
def test_trees_stay_trees() -> None:
    draw = random.Random(2)
    pairs = 0
    for _ in range(1000 * FACTOR):
        source, target, links = drawn(draw, most=draw.choice((3, 8, 20)))
        spans = list(drawn_spans(draw, 0, source))
        projected = project_spans(spans, Alignment(links), range(source), range(target))
        assert all(0 <= start <= end <= target for start, end in projected)
        for (one, place), (other, other_place) in combinations(zip(spans, projected, strict=True), 2):
            if one[1] <= other[0] or other[1] <= one[0]:  # disjoint, or one a place at the other's edge
                assert place[1] <= other_place[0] or other_place[1] <= place[0]
            elif holds(one, other):  # the first of equal ones is the outer one
                assert holds(place, other_place)
            else:
                assert holds(other, one)
                assert holds(other_place, place)
            pairs += 1
    assert pairs > 1000 * FACTOR


ROWS: list[tuple[str, Sequence[Span], Links, tuple[int, int], Sequence[Span]]] = [
    ("words in another order", [(0, 1), (1, 2)], [(0, 1), (1, 0)], (2, 2), [(1, 2), (0, 1)]),
    ("one wrong link far away", [(0, 3)], [(0, 0), (1, 1), (2, 2), (0, 6), (3, 3), (4, 4), (5, 5)], (6, 7), [(0, 3)]),
    ("a word between, as in ne mange pas", [(0, 1)], [(0, 0), (0, 2), (1, 1)], (2, 3), [(0, 3)]),
    ("the same, and that word in a span, too", [(0, 1), (1, 2)], [(0, 0), (0, 2), (1, 1)], (3, 3), [(0, 1), (1, 2)]),
    ("two spans of one word, as in du", [(0, 1), (1, 2)], [(0, 0), (1, 0)], (3, 2), [(0, 1), (1, 1)]),
    ("a span whose only word belongs rather elsewhere", [(1, 2)], [(0, 0), (1, 0), (2, 0)], (4, 2), [(0, 1)]),
    ("a place at the edge of one", [(1, 1), (1, 3)], [(0, 0), (1, 0), (0, 2), (2, 2)], (4, 3), [(0, 0), (0, 3)]),
    ("an unlinked word inside", [(0, 2)], [(0, 0), (1, 2), (2, 3)], (3, 4), [(0, 3)]),
    ("unlinked words at the edges", [(1, 2)], [(0, 0), (1, 2), (2, 4)], (3, 5), [(2, 3)]),
    ("the whole sentence", [(0, 2), (0, 2)], [(0, 1)], (2, 3), [(0, 3), (0, 3)]),
    ("no links", [(1, 2), (0, 1), (2, 3)], [], (3, 6), [(2, 2), (0, 0), (6, 6)]),
    ("no target words", [(0, 1), (1, 1)], [], (2, 0), [(0, 0), (0, 0)]),
    ("no source words", [(0, 0)], [], (0, 2), [(0, 0)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "links", "words", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_projected_spans(spans: Sequence[Span], links: Links, words: tuple[int, int], expected: Sequence[Span]) -> None:
    assert project_spans(spans, Alignment(links), range(words[0]), range(words[1])) == expected


def test_a_place_beside_a_word_goes_with_it() -> None:
    links = Alignment([(0, 2), (1, 3), (2, 1), (3, 0)])
    found = {
        beside: project_nested([NestedSpan(2, 2, beside=beside)], links, range(4), range(4))
        for beside in ("left", "right", None)
    }
    assert found == {"left": [[(4, 4)]], "right": [[(1, 1)]], None: [[(0, 0)]]}


@pytest.mark.parametrize(
    ("spans", "links", "message"),
    [
        ([(0, 2), (1, 3)], [], r"got the spans \(0, 2\) and \(1, 3\), which overlap; expected disjoint or nested ones"),
        ([(0, 4)], [], r"got the span \(0, 4\), expected one within the 3 source words"),
        ([(2, 1)], [], r"got the span \(2, 1\)"),
        ([(-1, 1)], [], r"got the span \(-1, 1\)"),
        ([], [(3, 0)], "got the link 3-0 of 3 source and 2 target words; expected links between words"),
        ([], [(0, 2)], "got the link 0-2 of 3 source and 2 target words"),
    ],
)
def test_spans_that_are_refused(spans: Sequence[Span], links: Links, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        project_spans(spans, Alignment(links), range(3), range(2))


def transferred(
    source: str,
    target: str,
    links: str,
    languages: tuple[str | None, str | None] = (None, None),
    *,
    syntax: Syntax = "xml",
    split: bool = False,
) -> str:
    markup = parse_markup(source, syntax)
    words = split_text(markup.text, languages[0], breaks=markup.breaks), split_text(target, languages[1])
    pairs = (link.split("-") for link in links.split())
    return transfer_tags(markup, target, Alignment([(int(i), int(j)) for i, j in pairs]), *words, split=split)


CASES = [
    # What a pair holds goes where its words go.
    ("the <b>red</b> house", "la maison rouge", "0-0 1-2 2-1", "la maison <b>rouge</b>"),
    ("a <i>red house</i>", "une maison rouge", "0-0 1-2 2-1", "une <i>maison rouge</i>"),
    ("see <a b=\"?a&amp;b\" c='> \"b\"'>it</a>", "le voir", "0-1 1-0", "<a b=\"?a&amp;b\" c='> \"b\"'>le</a> voir"),
    # Pairs that cross over; nested ones; the whole sentence; its end, which no link reaches.
    ("<b>a</b> <i>b</i>", "B A", "0-1 1-0", "<i>B</i> <b>A</b>"),
    ("<p><b>a <i>b</i></b> c.</p>", "C B A !", "0-2 1-1 2-0", "<p>C <b><i>B</i> A</b> !</p>"),
    ("<u><b>a b</b></u>", "x y z", "", "<u><b>x y z</b></u>"),
    # A word between: the pair holds it, unless it belongs to another pair.
    ("he does <b>not</b> eat", "il ne mange pas", "0-0 2-1 2-3 3-2", "il <b>ne mange pas</b>"),
    ("he does <b>not</b> <i>eat</i>", "il ne mange pas", "0-0 2-1 2-3 3-2", "il <b>ne</b> <i>mange</i> pas"),
    # Two words become one; one word becomes two; a word without links.
    ("of <b>the</b> house", "du logis", "0-0 1-0 2-1", "<b>du</b> logis"),
    ("<b>of</b> <i>the</i> house", "du logis", "0-0 1-0 2-1", "<b>du</b> <i></i>logis"),
    ("I <b>potatoes</b> eat", "je mange des pommes de terre", "0-0 2-1 1-3 1-5", "je mange des <b>pommes de terre</b>"),
    ("I <b>do</b> eat", "je mange", "0-0 2-1", "je <b></b>mange"),
    # Tags within a word.
    ("<b>in</b>credible news", "nouvelles incroyables", "0-1 1-0", "nouvelles <b>incroyables</b>"),
    ("un<b>believ</b>able", "incroyable", "0-0", "<b>incroyable</b>"),
    ('<b>d</b><i>o</i><a id="1">g</a>', "perro", "0-0", '<b>perro</b><i></i><a id="1"></a>'),
    ("maison<a></a>s bleue", "blue houses", "0-1 1-0", "blue houses<a></a>"),
    ("foo<br/>bar", "FOO BAR", "0-0 1-1", "FOO<br/>BAR"),
    # Single tags stay beside the word that they touch, or in their place, or at their edge.
    ("big house<fn/> of Paris", "Paris no ookii ie", "0-2 1-3 2-1 3-0", "Paris no ookii ie<fn/>"),
    ("the <img/>red house", "la maison rouge", "0-0 1-2 2-1", "la maison <img/>rouge"),
    ("the <img/> red house", "la maison rouge", "0-0 1-2 2-1", "la <img/>maison rouge"),
    ("Hello<fn/>!", "Bonjour !", "0-0 1-1", "Bonjour<fn/> !"),
    ("<x/>a b<y/>", "  B A  ", "0-1 1-0", "  <x/>B A<y/>  "),
    ("a <br><b>b</b><br> c", "A B C", "0-0 1-1 2-2", "A <br><b>B</b><br> C"),
    ("<b><i/>a</b> b", "B A", "0-1 1-0", "B <b><i/>A</b>"),
    ("a<x/><y/><z/> b", "A B", "0-0 1-1", "A<x/><y/><z/> B"),
    # Empty pairs, tags without words, translations without words.
    ("a <b></b>b <i> </i>", "A B", "0-0 1-1", "A <b></b>B<i></i>"),
    ("<b><br/></b>", "", "", "<b><br/></b>"),
    ("<b>a</b>", " ", "", "<b></b> "),
    ("<b></b>", "A", "", "<b></b>A"),
    # Spaces and punctuation.
    ("<b>Note</b>: a", "Note : A", "0-0 1-1 2-2", "<b>Note</b> : A"),
    ("<b> a </b>b", "A B", "0-0 1-1", "<b>A </b>B"),
    ("(<b>a</b>)", "« A »", "0-0 1-1 2-2", "« <b>A</b> »"),
    ("(<b>a</b>) b", "(A) B", "1-1 3-3", "(<b>A</b>) B"),
    # Text that looks like markup, and markup that holds no text.
    ("1 &lt; 2 <b>&amp;</b> a", "1 &lt; 2 &amp; A", "0-0 1-1 2-2 3-3 4-4", "1 &lt; 2 <b>&amp;</b> A"),
    ("a < b <3 <b>c</b> </ >", "A < B <3 C </ >", "5-5", "A < B <3 <b>C</b> </ >"),
    ("a <!-- <b> --> b<?php echo '>' ?>", "A B", "0-0 1-1", "A <!-- <b> -->B<?php echo '>' ?>"),
    ("a <![CDATA[ <x> & ]]> b <!DOCTYPE html>", "A B", "0-0 1-1", "A <![CDATA[ <x> & ]]>B<!DOCTYPE html>"),
    ("<script>a < b</script>a <STYLE>b>i {}</STYLE>", "A", "0-0", "<script>a < b</script>A<STYLE>b>i {}</STYLE>"),
    # HTML: upper case, void elements; elsewhere they may have ends.
    ("<B>a</b> b", "B A", "0-1 1-0", "B <B>A</b>"),
    ("<p>a<br>b<hr>c</p>", "A B C", "0-0 1-1 2-2", "<p>A<br>B<hr>C</p>"),
    ("<link>a</link> b", "B A", "0-1 1-0", "B <link>A</link>"),
    # Blocks divide words and sentences, and keep their order; a space that stands for a boundary is not written.
    ("<p>a</p><p>b</p>", "A B", "0-0 1-1", "<p>A</p><p>B</p>"),
    ("<p>a</p> <p>b</p>", "A B", "0-0 1-1", "<p>A</p> <p>B</p>"),
    ("<td><b>a</b> b</td><td>c <i>d</i></td>", "B A D C", "0-1 1-0 2-3 3-2", "<td>B <b>A</b></td><td><i>D</i> C</td>"),
    ("<LI>a</LI><LI>b</LI><LI>c</LI>", "C B A", "0-2 1-1 2-0", "<LI>C</LI><LI>B</LI><LI>A</LI>"),
    ("<div>x<p>a <b>b</b></p>y</div>", "X B A Y", "0-0 1-2 2-1 3-3", "<div>X<p><b>B</b> A</p>Y</div>"),
    ("<h1>a b</h1><h2>c d</h2>", "A the C D", "0-0 2-2 3-3", "<h1>A the</h1><h2>C D</h2>"),
    ("<p>a.</p><p>b</p>", "A. (B)", "0-0 2-3", "<p>A.</p><p>(B)</p>"),
    ("<p>a</p><p></p><p>b</p><hr>", "A B", "0-0 1-1", "<p>A</p><p></p><p>B</p><hr>"),
    ("<p>a</p><p>b</p>", "B", "1-0", "<p></p><p>B</p>"),
    ("<option>a</option><option>b</option>", "", "", "<option></option><option></option>"),
    ("<b>a <p>b</p> c</b>d", "A B C D", "0-0 1-1 2-2 3-3", "<b>A <p>B</p> C</b> D"),
    ("<div>a</div><div>中</div>", "A中", "0-0 1-1", "<div>A</div><div>中</div>"),
    # A word that is its own translation keeps the tags in it, and white space its place and its references.
    ("H<sub>2</sub>O<fn/> is", "H2O est", "0-0 1-1", "H<sub>2</sub>O<fn/> est"),
    ("a <b> b</b>", "A&nbsp;B", "0-0 1-1", "A<b>&nbsp;B</b>"),
    ("a <!-- c --> b", "A&nbsp; B", "0-0 1-1", "A<!-- c -->&nbsp; B"),
    ("super<wbr>b", "superb", "0-0", "super<wbr>b"),
    # XLIFF and TMX.
    ('<g id="1">a</g> <x id="2"/> b', "B A", "0-1 1-0", '<x id="2"/>B <g id="1">A</g>'),
    ('<bpt i="1">{\\b </bpt>a<ept i="1">}</ept> b', "B A", "0-1 1-0", 'B <bpt i="1">{\\b </bpt>A<ept i="1">}</ept>'),
    ('a<ph id="1">&lt;br/&gt;</ph> b', "A B", "0-0 1-1", 'A<ph id="1">&lt;br/&gt;</ph> B'),
    ('<it pos="open">&lt;b&gt;</it>a b', "B A", "0-1 1-0", '<it pos="open">&lt;b&gt;</it>B A'),
    ("<it>a</it> b", "B A", "0-1 1-0", "B <it>A</it>"),
    ('<sc id="1"/>a<ec startRef="1"/> b', "B A", "0-1 1-0", 'B <sc id="1"/>A<ec startRef="1"/>'),
    ('<bx id="1" rid="7"/>a<ex id="2" rid="7"/> b', "B A", "0-1 1-0", 'B <bx id="1" rid="7"/>A<ex id="2" rid="7"/>'),
    ('<sm id="m1"/>a<em startRef="m1"/> <em id="b">b</em>', "B A", "0-1 1-0",
     '<em id="b">B</em> <sm id="m1"/>A<em startRef="m1"/>'),
    ('<ec id="1" isolated="yes"/>a b<sc id="2" isolated="yes"/> c', "C B A", "0-2 1-1 2-0",
     '<ec id="1" isolated="yes"/>C B<sc id="2" isolated="yes"/> A'),
    ('<bx id="1"/>a <g id="2">b</g><ex id="1"/> c', "C B A", "0-2 1-1 2-0",
     'C <bx id="1"/><g id="2">B</g> A<ex id="1"/>'),
    # An entity is text, whatever a line declares.
    ('<!DOCTYPE a [<!ENTITY b "c">]> <b>&b;</b> d', "]> D &b;", "2-3 3-4 4-5 5-2",
     '<!DOCTYPE a [<!ENTITY b "c">]> D <b>&b;</b>'),
    # Other scripts.
    ("<b>東京</b>へ行く", "go to Tokyo", "0-2 1-2 2-1 3-0 4-0", "go to <b>Tokyo</b>"),
    ("<é:ü xml:lang='fr'>à</é:ü> b", "B À", "0-1 1-0", "B <é:ü xml:lang='fr'>À</é:ü>"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "links", "expected"), CASES)
def test_transferred_tags(source: str, target: str, links: str, expected: str) -> None:
    assert transferred(source, target, links) == expected
    assert "".join(parse_markup(expected).text.split()) == "".join(target.split())


KEPT = [
    # What stays as it is: for the same words, for a translation of them, for part of a word, for none.
    ("Press <kbd>Ctrl</kbd> now", "Jetzt Ctrl drücken", "0-2 1-0 2-0", "Jetzt <kbd>Ctrl</kbd> drücken"),
    ("Press <kbd>Ctrl</kbd> now", "Jetzt Strg drücken", "0-2 1-1 2-0", "Jetzt <kbd>Ctrl</kbd> drücken"),
    ("the <code>int</code>s", "les ints", "0-0 1-1 2-1", "les <code>int</code>s"),
    ("the <code>int</code> value", "der int-Wert", "0-0 1-1 2-1", "der <code>int</code>-Wert"),
    ("the <code>x</code> value", "der max-Wert", "0-0 1-1 2-1", "der <code>x</code> max-Wert"),
    ("a<code>x</code> b", "A B", "0-0 2-1", "A<code>x</code> B"),
    ("press <kbd>Ctrl</kbd> now", "drücken", "0-0", "drücken <kbd>Ctrl</kbd>"),
    ("<kbd>A</kbd> or <kbd>A</kbd>", "A oder A", "0-0 2-0 1-1", "<kbd>A</kbd> oder <kbd>A</kbd>"),
    ("<i translate = no>New <b>York</b></i>a", "A Nova York", "0-1 1-2 2-0", "A <i translate = no>New <b>York</b></i>"),
    ("<pre>x =  <u>1</u></pre>a", "x = 1 A", "0-0 1-1 2-2 3-3", "<pre>x =  <u>1</u></pre>A"),
]


@pytest.mark.parametrize(("source", "target", "links", "expected"), KEPT)
def test_content_that_stays_as_it_is(source: str, target: str, links: str, expected: str) -> None:
    assert transferred(source, target, links) == expected


NOTE = r"\f + \fr 1.2 \ft Or: the \+nd Lord\+nd* \fqa | <b>\f*"
USFM = [
    # Paragraphs and verses stay, with their numbers; lines without text.
    (r"\p \v 1 the red house", "la maison rouge", "0-0 1-2 2-1", r"\p \v 1 la maison rouge"),
    (r"\v 1 a b. \v 2-3 c \nd d\nd*", "B A. D C", "0-1 1-0 2-2 3-4 4-3", r"\v 1 B A. \v 2-3 \nd D\nd* C"),
    (r"\v 1\va 2\va*\nd a\nd* b", "B A", "0-1 1-0", r"\v 1\va 2\va*B \nd A\nd*"),
    (r"\p\v 1\nd a\nd* b", "B A", "0-1 1-0", r"\p\v 1 B \nd A\nd*"),
    (r"\p“a” b", "B « A »", "0-1 1-2 2-3 3-0", r"\p B « A »"),
    (r"\q1 a\q2 b", "A B", "0-0 1-1", r"\q1 A\q2 B"),
    (r"\p\v 1\va 2\va* a \tc1-2 b", "A B", "0-0 1-1", r"\p\v 1\va 2\va* A \tc1-2 B"),
    (r"\id GEN \h of 1 < 2 & \\", "", "", r"\id GEN \h of 1 < 2 & \\"),
    (r"\c 1", "", "", r"\c 1"),
    (r"\b", "", "", r"\b"),
    # Pairs, with attributes, nested, of one's own.
    (r"the \nd Lord\nd* spoke", "parla le Seigneur", "0-1 1-2 2-0", r"parla le \nd Seigneur\nd*"),
    (r'\w red|lemma="a"\w* \w house|x-y="1"\w*', "maison rouge", "0-1 1-0",
     r'\w maison|x-y="1"\w* \w rouge|lemma="a"\w*'),
    (r"\add a \+nd b\+nd*\add* c.", "C B A.", "0-2 1-1 2-0 3-3", r"C \add \+nd B\+nd* A\add*."),
    (r"\add a \nd b\nd*\add* c", "C B A", "0-2 1-1 2-0", r"C \add \nd B\nd* A\add*"),
    (r"\zmine a\zmine* b", "B A", "0-1 1-0", r"B \zmine A\zmine*"),
    # Notes and milestones go with the word that they touch, and are not read.
    (f"red{NOTE} house", "maison rouge", "0-1 1-0", f"maison rouge{NOTE}"),
    (r'a \qt-s |sid="1" who="x"\*b\qt-e |eid="1"\* c\ts\*', "C B A", "0-2 1-1 2-0",
     r'C \qt-s |sid="1" who="x"\*B\qt-e |eid="1"\* A\ts\*'),
    (r"a\x - \xo 1.1 \xt Gen 1\x* \fig a|src='b'\fig*", "A", "0-0", r"A\x - \xo 1.1 \xt Gen 1\x*\fig a|src='b'\fig*"),
    # What is markup elsewhere.
    (r"1 < 2 <b> | // ~ \nd &lt;\nd*", "1 < 2 <b> | // ~ &lt;", "9-9", r"1 < 2 <b> | // ~ \nd &lt;\nd*"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "links", "expected"), USFM)
def test_transferred_markers(source: str, target: str, links: str, expected: str) -> None:
    assert transferred(source, target, links, syntax="usfm") == expected


SPLIT = [
    ("he does <b>not</b> eat", "il ne mange pas", "0-0 2-1 2-3 3-2", "il <b>ne</b> mange <b>pas</b>"),
    # However far; without links between; a word that is as much inside as outside.
    ("I <b>call</b> you later", "Ich rufe dich nachher an", "0-0 1-1 1-4 2-2 3-3",
     "Ich <b>rufe</b> dich nachher <b>an</b>"),
    ("a <b>b</b> c", "B x B C", "1-0 1-2 2-3", "<b>B x B</b> C"),
    ("a <b>b</b> c", "B y B C", "1-0 1-1 0-1 1-2 2-3", "<b>B y B</b> C"),
    # One that belongs to two others in turn; single tags between.
    ("<i>a</i> <b>b</b>", "A B A B", "0-0 0-2 1-1 1-3", "<i>A</i> <b>B</b> <i>A</i> <b>B</b>"),
    ("<b>a</b> c<fn/>", "A C A", "0-0 0-2 1-1", "<b>A</b> C <b>A</b><fn/>"),
    # Around all, around others, kept as it is.
    ("<b>a</b>", "A x A", "0-0 0-2", "<b>A x A</b>"),
    ("<u><b>a</b> c</u> d", "A D A C", "0-0 0-2 2-1 1-3", "<u><b>A</b> D <b>A</b> C</u>"),
    ("<code>a</code> c", "a C a", "0-0 0-2 1-1", "<code>a</code> C a"),
    # Ids are unique.
    ('<a ID="1">a</a> c', "A C A", "0-0 0-2 1-1", '<a ID="1">A C A</a>'),
    ('<g id="1">a</g> c', "A C A", "0-0 0-2 1-1", '<g id="1">A C A</g>'),
    ('<mrk mid="1">a</mrk> c', "A C A", "0-0 0-2 1-1", '<mrk mid="1">A C A</mrk>'),
    ('<bpt i="1">b</bpt>a<ept i="1">b</ept> c', "A C A", "0-0 0-2 1-1", '<bpt i="1">b</bpt>A C A<ept i="1">b</ept>'),
    ('<sc id="1"/>a<ec startRef="1"/> c', "A C A", "0-0 0-2 1-1", '<sc id="1"/>A C A<ec startRef="1"/>'),
    ('<pc id="1" type="x">a</pc> c', "A C A", "0-0 0-2 1-1",
     '<pc id="1" type="x">A</pc> C <pc id="1-2" copyOf="1" type="x">A</pc>'),
    ("<pc id='1' dataRefStart='d'>a</pc> c<ph id='1-2'/>", "A C A", "0-0 0-2 1-1",
     "<pc id='1' dataRefStart='d'>A</pc> C <pc id=\"1-3\" dataRefStart='d'>A</pc><ph id='1-2'/>"),
    ('<pc id="1" canCopy="no">a</pc> c', "A C A", "0-0 0-2 1-1", '<pc id="1" canCopy="no">A C A</pc>'),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "links", "expected"), SPLIT)
def test_split_pairs(source: str, target: str, links: str, expected: str) -> None:
    assert transferred(source, target, links, split=True) == expected


def test_split_markers() -> None:
    def found(source: str) -> str:
        return transferred(source, "il ne mange pas", "0-0 2-1 2-3 3-2", syntax="usfm", split=True)

    assert found(r'he does \w not|lemma="n"\w* eat') == r'il \w ne|lemma="n"\w* mange \w pas|lemma="n"\w*'
    assert found(r'he does \w not|id="n"\w* eat') == r'il \w ne mange pas|id="n"\w*'


def test_apostrophes_end_words_by_language() -> None:
    assert transferred("the <b>hour</b>", "l'heure", "0-0 1-1", ("en", "fr")) == "l'<b>heure</b>"
    assert transferred("l'<b>heure</b>", "the hour", "0-0 1-1", ("fr", "en")) == "the <b>hour</b>"


def test_translations_with_tags_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="got '<b>' at character 3 of the translation, expected text without"):
        transferred("a", "A <b>", "0-0")


# Each is one word or several, or none; text of one is never markup.
TEXTS = ["a", "bc", "d'e", "f-g", "1,5", ".", ",", "...", "«", "é", "中文", "&lt;", "&amp;", "&#60;b&#62;", "'", '"']
TEXTS += [" ", " ", " ", "  ", "\t", "\u00a0", "\u200b", "e\u0301", "😀", "%s", "{x}", "]]&gt;", "--&gt;"]


def drawn_content(draw: random.Random, depth: int = 0) -> Iterator[str]:
    """Well-formed XML: text, and elements that each have a number of their own."""
    for _ in range(draw.choice((0, 1, 2, 3, 5) if depth else (1, 3, 6))):
        kind = draw.random()
        number = draw.randrange(10**9)
        if kind < 0.5 or depth > 5:
            yield "".join(draw.choices(TEXTS, k=draw.randint(1, 4)))
        elif kind < 0.6:
            yield f"<{draw.choice(('x', 'br', 'img'))} n='{number}' alt='&gt;>/'{draw.choice(('', ' '))}/>"
        else:
            name = draw.choice(("b", "i", "a", "ns.g", "sub"))
            yield f'<{name} n="{number}"{draw.choice(("", " href="))}'.replace("href=", 'href="&lt;b> />"') + ">"
            yield from drawn_content(draw, depth + 1)
            yield f"</{name}{draw.choice(('', ' '))}>"


def drawn_case(draw: random.Random) -> tuple[str, str, list[TextWord], list[TextWord], Alignment]:
    source = "".join(drawn_content(draw))
    target = "".join(draw.choices(TEXTS, k=draw.choice((0, 1, 4, 10))))
    markup = parse_markup(source)
    words = split_text(markup.text, draw.choice(("en", "fr", None)), breaks=markup.breaks), split_text(target)
    count = draw.choice((0, 1, 5, 15)) if all(words) else 0
    links = [(draw.randrange(len(words[0])), draw.randrange(len(words[1]))) for _ in range(count)]
    return source, target, *words, Alignment(links)


def tree(text: str) -> tuple[list[tuple[str, str, tuple[tuple[str, str], ...], str | None]], str]:
    """Every element's name, number, attributes and parent, and all text, as an XML parser reads them."""
    root = ElementTree.fromstring(f"<root>{text}</root>")
    found = [
        (child.get("n", ""), child.tag, tuple(sorted(child.items())), parent.get("n"))
        for parent in root.iter()
        for child in parent
    ]
    return sorted(found, key=lambda element: element[0]), "".join(root.itertext())


@pytest.mark.fuzz
def test_no_tag_is_lost_doubled_or_moved_in_the_tree() -> None:
    draw = random.Random(0)
    tags = 0
    for _ in range(1000 * FACTOR):
        source, target, source_words, target_words, links = drawn_case(draw)
        markup = parse_markup(source)
        found = transfer_tags(markup, target, links, source_words, target_words)
        back = parse_markup(found)
        # Breaks and the space that they stand for.
        assert back.text == target or ("br" in source and "".join(back.text.split()) == "".join(target.split()))
        assert tree(found)[0] == tree(source)[0]
        written = [sorted((e.opening, e.closing) for e in one.elements if e.opening) for one in (markup, back)]
        assert written[0] == written[1]
        # A pair holds words whole, unless its translation is the same word.
        assert "br" in source or not any(
            w.start < place < w.end and w not in source_words
            for e in back.elements
            for place in (e.start, e.end)
            for w in target_words
        )
        tags += len(markup.elements)
    assert tags > 2000 * FACTOR


BLOCKS = ("p", "td", "LI", "h1", "div", "option", "pre")
INLINE = ("b", "I", "a", "span", "g", "ns.x", "code", "kbd")
SINGLE = ["<br>", "<BR />", "<hr>", "<img alt='>'>", "<x id='1'/>", "<!-- <b> -->", "<![CDATA[ <x> ]]>", "<?pi > ?>"]
SINGLE += ["<wbr>", "<p/>", '<ph id="1">{1}</ph>', "<script>a<b</script>"]
ATTRIBUTES = ("", " n='1'", ' href="&lt;b> />"', ' translate="no"', " translate=no", ' title=">"')
SEVERAL = ["x y. Z! ", "a < b", "&nbsp;", "&#160;", "&", "مرحبا", "👩\u200d👩\u200d👧", "\u00ad", "\u3000", "\u2028"]
SEVERAL += TEXTS


def drawn_html(draw: random.Random, depth: int = 0) -> Iterator[str]:
    """Well-formed HTML: blocks and inline elements in each other, single tags, texts with and without white space."""
    for _ in range(draw.choice((0, 1, 2, 3, 5) if depth else (1, 3, 6))):
        kind = draw.random()
        if kind < 0.5 or depth > 5:
            yield "".join(draw.choices(SEVERAL, k=draw.randint(1, 4)))
        elif kind < 0.65:
            yield draw.choice(SINGLE)
        else:
            name = draw.choice(BLOCKS if draw.random() < 0.5 else INLINE)
            yield f"<{name}{draw.choice(ATTRIBUTES)}>"
            yield from drawn_html(draw, depth + 1)
            yield f"</{name}{draw.choice(('', ' '))}>"


@pytest.mark.fuzz
def test_a_text_that_is_its_own_translation_keeps_every_tag_in_its_place() -> None:
    draw = random.Random(4)
    blocks = 0
    for _ in range(250 * FACTOR):
        source = "".join(drawn_html(draw))
        markup = parse_markup(source)
        words = split_text(markup.text, draw.choice(("en", "fr", None)), breaks=markup.breaks)
        spans = markup.blocks(words)
        assert [word for start, end in spans for word in words[start:end]] == words
        links = Alignment([(index, index) for index in range(len(words))])
        for cuts in (None, [start for start, _ in spans[1:]]):
            assert transfer_tags(markup, markup.text, links, words, words, cuts=cuts) == source
        blocks += len(spans)
    assert blocks > 400 * FACTOR


@pytest.mark.fuzz
def test_the_words_of_a_block_stay_in_it() -> None:
    draw = random.Random(5)
    for _ in range(300 * FACTOR):
        numbers = [draw.randint(0, 4) for _ in range(draw.randint(1, 5))]
        source = ""
        target: list[str] = []
        links: Links = []
        for block, number in enumerate(numbers):
            order = draw.sample(range(number), number)
            first = len(target)
            source += f"<p n='{block}'>" + " ".join(f"<b>s{first + n}</b>" for n in range(number)) + "</p>"
            target += [f"t{first + n}" for n in order]
            links += [(first + n, first + order.index(n)) for n in range(number)]
        if draw.random() < 0.5 and links:  # a wrong one, to anywhere
            links.append((draw.randrange(len(target)), draw.randrange(len(target))))
        markup = parse_markup(source)
        words = split_text(markup.text, breaks=markup.breaks), split_text(" ".join(target))
        cuts = [sum(filter(None, numbers[:n])) for n, number in enumerate(numbers) if number][1:]
        found = transfer_tags(markup, " ".join(target), Alignment(links), *words, cuts=cuts)
        paragraphs = [paragraph.split(">", 1)[1] for paragraph in found.split("</p>")[:-1]]
        assert [set(re.findall(r"\d+", paragraph)) for paragraph in paragraphs] == [
            {str(sum(numbers[:block]) + n) for n in range(number)} for block, number in enumerate(numbers)
        ]
        if len(links) == len(target):
            assert transfer_tags(markup, " ".join(target), Alignment(links), *words) == found


@pytest.mark.parametrize("cuts", [[], [1, 1], [3], [-1]])
def test_cuts_that_are_refused(cuts: list[int]) -> None:
    markup = parse_markup("<p>a</p><p>b</p>")
    words = split_text(markup.text, breaks=markup.breaks)
    with pytest.raises(InvalidInputError, match=r"got cuts=.* of 2 target words for 2 blocks; expected the first"):
        transfer_tags(markup, "A B", Alignment(), words, split_text("A B"), cuts=cuts)


@pytest.mark.fuzz
def test_the_same_links_in_the_same_order_keep_every_tag_in_its_place() -> None:
    draw = random.Random(1)
    for _ in range(300 * FACTOR):
        words = [f"w{n}" for n in range(draw.randint(1, 8))]
        spans = sorted(draw.choices(range(len(words) + 1), k=2 * draw.randint(1, 2)))
        opened = [f"<b n='{place}'>" for place in spans[::2]]
        source = "".join(
            "".join("</b>" for end, start in zip(spans[1::2], spans[::2], strict=True) if start < end == place)
            + (" " if 0 < place < len(words) else "")
            + "".join(
                tag for tag, start, end in zip(opened, spans[::2], spans[1::2], strict=True) if start == place < end
            )
            + (words[place] if place < len(words) else "")
            for place in range(len(words) + 1)
        )
        target = " ".join(words).upper()
        links = " ".join(f"{n}-{n}" for n in range(len(words)))
        assert transferred(source, target, links) == source.replace("w", "W")


@pytest.mark.fuzz
def test_damaged_markup_is_read_or_refused() -> None:
    draw = random.Random(2)
    files = ["".join(drawn_content(draw)).encode() for _ in range(20)] + [case[0].encode() for case in CASES]
    files += ["".join(drawn_usfm(draw)).encode() for _ in range(20)]
    read, messages = 0, []
    for content in damaged(files, 800, seed=3):
        text = content.decode("utf-8", "replace")[:20_000]
        syntax: Syntax = "usfm" if "\\" in text else "xml"
        with limited():
            try:
                markup = parse_markup(text, syntax)
            except InvalidInputError as error:
                messages.append(str(error))
                continue
            words = split_text(markup.text[:2_000], breaks=markup.breaks)
            found = transfer_tags(markup, "A b < c, &amp; d.", Alignment(), words, split_text("A b < c, &amp; d."))
        # But for the space that a boundary of blocks stands for.
        kept = any(element.content is not None for element in markup.elements)
        assert kept or "".join(parse_markup(found, syntax).text.split()) == "Ab<c,&amp;d."
        read += 1
    assert min(read, len(messages)) > 80
    assert all(re.search("expected (tags|markers) in pairs", message) and "\n" not in message for message in messages)


STYLES = ("nd", "add", "w", "zmine")
PLAIN = [text for text in TEXTS if "\u200b" not in text]


def drawn_usfm(draw: random.Random, depth: int = 0) -> Iterator[str]:
    """Well-formed USFM: paragraphs, pairs in pairs, notes and milestones, each with a number of its own."""
    for _ in range(draw.choice((0, 1, 2, 3, 5) if depth else (1, 3, 6))):
        kind, number = draw.random(), draw.randrange(10**9)
        if kind < 0.5 or depth > 5:
            yield "".join(draw.choices(PLAIN, k=draw.randint(1, 4)))
        elif kind < 0.6:
            yield draw.choice((rf"\v {number} ", rf"\q{number} ", rf"\c  {number}{draw.choice(('', ' '))}"))
        elif kind < 0.7:
            yield draw.choice((rf"\f + \ft {number} \+nd b\+nd*\f*", rf"\ts-s |sid='{number}'\*", rf"\x {number}\x*"))
        else:
            name = "+" * bool(depth) + draw.choice(STYLES)
            yield rf"\{name} "
            yield from drawn_usfm(draw, depth + 1)
            yield rf"|n='{number}'\{name}*"


@pytest.mark.fuzz
def test_no_marker_is_lost_doubled_or_moved_in_the_tree() -> None:
    draw = random.Random(6)
    markers = 0
    for _ in range(500 * FACTOR):
        markup = parse_markup("".join(drawn_usfm(draw)), "usfm")
        words = split_text(markup.text, breaks=markup.breaks)
        target = "".join(draw.choices(PLAIN, k=draw.randint(0, 9)))
        targets = split_text(target)
        count = draw.choice((0, 1, 5, 15)) if words and targets else 0
        links = Alignment((draw.randrange(len(words)), draw.randrange(len(targets))) for _ in range(count))
        back = parse_markup(transfer_tags(markup, target, links, words, targets), "usfm")
        assert "".join(back.text.split()) == "".join(target.split())
        written = [
            Counter(
                (e.opening.strip(), e.closing, one.elements[e.parent].closing if e.parent >= 0 else "")
                for e in one.elements
                if e.opening
            )
            for one in (markup, back)
        ]
        assert written[0] == written[1]
        alike = Alignment((index, index) for index in range(len(words)))
        assert parse_markup(transfer_tags(markup, markup.text, alike, words, words), "usfm") == markup
        markers += len(markup.elements)
    assert markers > 1000 * FACTOR


@pytest.mark.fuzz
def test_split_spans_hold_the_words_that_belong_to_them_and_no_others() -> None:
    draw = random.Random(7)
    several = 0
    for _ in range(2000 * FACTOR):
        source, target, links = drawn(draw, most=12)
        cuts = sorted(draw.choices(range(source + 1), k=2 * draw.randint(1, 3)))
        spans = [NestedSpan(*cut, split=True) for cut in zip(cuts[::2], cuts[1::2], strict=True) if cut != (0, source)]
        projected = project_nested(spans, Alignment(links), range(source), range(target))
        covered = Counter(word for pieces in projected for start, end in pieces for word in range(start, end))
        assert all(number == 1 for number in covered.values())
        for span, pieces in zip(spans, projected, strict=True):
            inside = Counter(j for i, j in links if span.start <= i < span.end)
            outside = Counter(j for i, j in links if not span.start <= i < span.end)
            held = {word for word in inside if inside[word] > outside[word]}
            words = {word for start, end in pieces for word in range(start, end)}
            if held:
                assert held <= words
                assert not any(outside[word] > inside[word] for word in words)
                assert all(start in held and end - 1 in held for start, end in pieces)
                # Between two pieces is a word that belongs elsewhere.
                assert all(
                    any(outside[word] > inside[word] for word in range(end, start))
                    for (_, end), (start, _) in pairwise(pieces)
                )
            several += len(pieces) > 1
    assert several > 50 * FACTOR


MANY = 10_000
LONG = [
    "<b>" * MANY + "a" + "</b>" * MANY,
    "<br/>" * MANY,
    "a<b" * MANY,
    "<!--" * MANY,
    "<a " + "'\"" * MANY,
    "<" * MANY,
    "<" + "a" * 2 * MANY,
    '<pc id="1">a</pc>' * MANY,
    '<sc id="1"/>' * MANY,
    *("&lol;" * MANY, '<!ENTITY a "&a;">' * MANY),
]
LONG_USFM = [
    r"\+nd " * MANY + "a" + r"\+nd*" * MANY,
    r"\nd a\nd*" * MANY,
    *(one * MANY for one in (r"\nd ", r"\nd*", r"\f ", r"\f \f*", r"\v 1 ", "\\", "|", "|a", r"\a |", r"\a-s |a\*")),
    *("\\" + one * 2 * MANY for one in ("a", "a ", " ", "+", "v ")),
]


@pytest.mark.parametrize(
    ("text", "syntax"), [*((text, "xml") for text in LONG), *((text, "usfm") for text in LONG_USFM)]
)
def test_long_lines_take_time_by_their_length(text: str, syntax: Syntax) -> None:
    with limited():
        try:
            markup = parse_markup(text, syntax)
        except InvalidInputError:
            return
        words = split_text(markup.text[:9], breaks=markup.breaks)
        found = transfer_tags(markup, "A B", Alignment(), words, split_text("A B"), split=True)
    assert parse_markup(found, syntax).text.split() == ["A", "B"]
