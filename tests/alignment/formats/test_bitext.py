"""TMX and XLIFF: the pairs of real kinds of files, which side is the source, and files that are none or hostile."""

import gzip
from pathlib import Path

import pytest

from alignment.formats.bitext import is_bitext, read_bitext
from captum_norm import InvalidInputError

TMX = """<?xml version="1.0" encoding="{encoding}"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en-US" datatype="xml"><note>no seg</note></header><body>
<tu><note>a note</note><tuv xml:lang="en-US"><seg>The <bpt i="1">&lt;b&gt;</bpt>house<ept i="1">&lt;/b&gt;</ept>
  is small.</seg></tuv><tuv xml:lang="fr"><prop>x</prop><seg>La maison &amp; l’été</seg></tuv></tu>
<tu><tuv xml:lang="fr-FR"><seg>Le <hi>débat</hi><ph>&lt;br/&gt;</ph></seg></tuv><tuv xml:lang="en"><seg/></tuv></tu>
<tu/>
</body></tmx>
"""
XLIFF = """<?xml version="1.0"?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file source-language="fr" target-language="en"><body>
<trans-unit id="1"><source>La <g id="1">maison</g><x id="2"/>.</source>
<seg-source><mrk mtype="seg" mid="0">La maison.</mrk></seg-source><target>The <mrk mtype="seg">house.</mrk></target>
<alt-trans><source>Le</source><target>wrong</target></alt-trans></trans-unit>
<group><trans-unit id="2"><source>Le débat<ph id="3">{{x}}</ph></source></trans-unit></group>
</body></file></xliff>
"""
XLIFF2 = """<x:xliff version="2.0" srcLang="fr" trgLang="en" xmlns:x="urn:oasis:names:tc:xliff:document:2.0">
<x:file id="f">
<x:unit id="1"><x:notes><x:note>no</x:note></x:notes><x:segment><x:source>La <x:pc id="1">maison</x:pc>.</x:source>
<x:target>The house.</x:target></x:segment><x:ignorable><x:source> </x:source></x:ignorable>
<x:segment><x:source>Le débat</x:source></x:segment></x:unit></x:file></x:xliff>
"""


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.replace("{encoding}", encoding).encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-15"])
def test_tmx(tmp_path: Path, encoding: str) -> None:
    file = write(tmp_path / "memory.tmx", TMX.replace("’", "'"), encoding)
    english, french = ["The house is small.", "", ""], ["La maison & l'été", "Le débat", ""]
    assert list(read_bitext(file)) == list(zip(english, french, strict=True))
    assert list(read_bitext(file, ("fr", "en"))) == list(zip(french, english, strict=True))
    assert list(read_bitext(file, ("fr_XX", "en_XX"))) == list(zip(french, english, strict=True))
    packed = tmp_path / "memory.tmx.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert is_bitext(packed)
    assert list(read_bitext(packed)) == list(read_bitext(file))


@pytest.mark.parametrize("text", [XLIFF, XLIFF2])
def test_xliff(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "text.xlf", text)
    for languages in ((None, None), ("fr", "en"), ("de", "en")):
        assert list(read_bitext(file, languages)) == [("La maison.", "The house."), ("Le débat", "")]
    with pytest.raises(InvalidInputError, match="is from fr to en, but the model translates en–fr; give the model of"):
        list(read_bitext(file, ("en", "fr")))


def test_a_unit_of_several_languages_needs_two_names(tmp_path: Path) -> None:
    sides = "".join(f'<tuv xml:lang="{code}"><seg>{code}</seg></tuv>' for code in ("de", "en", "fr"))
    file = write(tmp_path / "memory.tmx", f'<tmx><header srclang="*all*"/><body><tu>{sides}</tu></body></tmx>')
    assert list(read_bitext(file, ("fr", "de"))) == [("fr", "de")]
    with pytest.raises(InvalidInputError, match="unit 1 has the languages de, en, fr; name two of them by"):
        list(read_bitext(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the XML is broken .no element found.; export it again"),
        ("<tmx><body><tu>", "the XML is broken .no element found"),
        ("<tmx>\n</tnx>", "line 2: the XML is broken .mismatched tag"),
        ("das Haus\tthe house\n", "the XML is broken .syntax error"),
        ("<html/>", "got the root element html; expected tmx or xliff"),
        ('<?xml version="1.0" encoding="none"?><tmx/>', "the XML is broken .unknown encoding"),
        ('<!DOCTYPE tmx [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><tmx>&b;</tmx>', "declares the entity a; remove its"),
        ('<!DOCTYPE tmx [<!ENTITY a SYSTEM "file:///etc/passwd">]><tmx>&a;</tmx>', "declares the entity a; remove its"),
        ("<tmx>" + "<a>" * 1_000_000, "the XML is broken .no element found"),  # takes no stack
        ("<tmx><tu><tuv><seg>" + "a " * (1 << 19) + "a</seg></tuv></tu></tmx>", "unit 1 has more than 1,048,576 char"),
    ],
)
def test_what_is_refused_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as raised:
        list(read_bitext(write(tmp_path / "memory.tmx", text)))
    assert len(str(raised.value)) < 400
