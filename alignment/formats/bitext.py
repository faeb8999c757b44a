"""Reads the sentence pairs of TMX and XLIFF files (1.2 and 2), which translation tools exchange.

translate-toolkit reads them, too, but is under the GPL. Python's expat loads no other file, and a file that declares
entities is refused.
"""

from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from xml.parsers import expat

from alignment.tokenization import Languages
from captum_norm import InvalidInputError
from captum_norm.checks import quoted_name
from captum_norm.text.lines import raw_lines

SUFFIXES = (".tmx", ".xlf", ".xliff")

_UNITS = {"tu": "tuv", "trans-unit": "trans-unit", "segment": "segment"}
"""The elements of sentence pairs, and those that hold a side's text."""
_SIDES = ("seg", "source", "target")
# Their content is markup of the text around them, or another text.
_CODES = ("bpt", "ept", "it", "ph", "sub", "ut", "cp")
_LONGEST = 1 << 20


def is_bitext(name: str | PathLike[str]) -> bool:
    """Whether a name is that of a TMX or XLIFF file, perhaps compressed."""
    return fspath(name).lower().removesuffix(".gz").removesuffix(".xz").removesuffix(".bz2").endswith(SUFFIXES)


def read_bitext(path: str | PathLike[str], languages: Languages = (None, None)) -> Iterator[tuple[str, str]]:
    """Yield the source and target text of each unit, "" for a side that it lacks; white space becomes single spaces.

    Args:
        path: the file or URL; ``.gz``, ``.xz`` and ``.bz2`` are decompressed.
        languages: codes of the source and the target language, which choose the sides of a TMX unit; where unknown, the
            source is in the language of its header. An XLIFF file of the opposite direction is refused.

    Raises:
        InvalidInputError: the file cannot be read, is neither TMX nor XLIFF, or declares entities; a unit is longer
            than a million characters, or has several other languages to choose from.
    """
    units, number = _Units(path, languages), 0
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler, parser.EndElementHandler = units.start, units.end
    parser.CharacterDataHandler, parser.EntityDeclHandler = units.characters, units.refuse_entity
    try:
        for line in raw_lines(path):
            parser.Parse(line, False)
            yield from units.taken()
        parser.Parse(b"", True)
        yield from units.taken()
    except InvalidInputError:
        raise
    except (expat.ExpatError, ValueError, LookupError) as error:
        number = getattr(error, "lineno", number)
        reason = expat.ErrorString(error.code) if isinstance(error, expat.ExpatError) else error
        raise InvalidInputError(
            f"{units.name}, line {number}: the XML is broken ({reason}); export it again"
        ) from error


class _Units:
    """Handlers of expat, which collect the sides of each unit."""

    def __init__(self, path: str | PathLike[str], languages: Languages) -> None:
        self.name = quoted_name(fspath(path))
        self._languages = languages
        self._header: str | None = None
        self._open: list[str] = []
        self._unit: dict[str, str] = {}
        self._key = ""
        self._text: list[str] | None = None
        self._letters = self._codes = self._count = 0
        self._pairs: list[tuple[str, str]] = []

    def taken(self) -> list[tuple[str, str]]:
        """The pairs that were read since the last time."""
        pairs, self._pairs = self._pairs, []
        return pairs

    def refuse_entity(self, name: str, *_: object) -> None:
        raise InvalidInputError(f"{self.name} declares the entity {quoted_name(name)}; remove its <!ENTITY …> lines")

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        tag = _local(tag)
        values = {_local(key): value for key, value in attributes.items()}
        if not self._open and tag not in ("tmx", "xliff"):
            raise InvalidInputError(f"{self.name}: got the root element {quoted_name(tag)}; expected tmx or xliff")
        if tag == "header":
            self._header = values.get("srclang")
        elif tag in ("xliff", "file"):
            self._check_direction(
                values.get("srcLang") or values.get("source-language"),
                values.get("trgLang") or values.get("target-language"),
            )
        elif tag in _UNITS:
            self._unit, self._letters = {}, 0
        elif tag == "tuv":
            self._key = values.get("lang", "")
        elif tag in _SIDES and self._open[-1] in _UNITS.values():
            self._key = self._key if tag == "seg" else tag
            self._text = []
        self._codes += tag in _CODES
        self._open.append(tag)

    def characters(self, text: str) -> None:
        if self._text is None or self._codes:
            return
        self._text.append(text)
        self._letters += len(text)
        if self._letters > _LONGEST:
            raise InvalidInputError(
                f"{self.name}: unit {self._count + 1} has more than {_LONGEST:,} characters; expected sentences"
            )

    def end(self, tag: str) -> None:
        self._open.pop()
        tag = _local(tag)
        self._codes -= tag in _CODES
        if tag in _SIDES and self._text is not None and self._open[-1] in _UNITS.values():
            self._unit[self._key] = " ".join("".join(self._text).split())
            self._text = None
        elif tag in _UNITS:
            self._count += 1
            if tag == "tu":
                self._pairs.append(self._chosen())
            else:
                self._pairs.append((self._unit.get("source", ""), self._unit.get("target", "")))

    def _chosen(self) -> tuple[str, str]:
        """The sides of a unit of TMX."""
        texts = dict(self._unit)
        source = _language(texts, self._languages[0]) or _language(texts, self._header) or next(iter(texts), "")
        first = texts.pop(source, "")
        target = _language(texts, self._languages[1]) or next(iter(texts), "")
        if len(texts) > 1 and _language(texts, self._languages[1]) is None:
            raise InvalidInputError(
                f"{self.name}: unit {self._count} has the languages {', '.join(self._unit)}; name two of them by "
                "--source-language and --target-language, or export two"
            )
        return first, texts.get(target, "")

    def _check_direction(self, *sides: str | None) -> None:
        wanted, given = (
            tuple(None if code is None else _primary(code) for code in codes) for codes in (self._languages, sides)
        )
        if None not in given and wanted == given[::-1] and wanted != given:
            raise InvalidInputError(
                f"{self.name} is from {sides[0]} to {sides[1]}, but the model translates {'–'.join(map(str, wanted))}; "
                "give the model of its direction with --model"
            )


def _local(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition(" ")[2]


def _primary(code: str) -> str:
    """The language of a code such as fr-FR or fr_XX."""
    return code.lower().replace("_", "-").partition("-")[0]


def _language(texts: Mapping[str, str], wanted: str | None) -> str | None:
    """The code of the text in a language."""
    return None if wanted is None else next((code for code in texts if _primary(code) == _primary(wanted)), None)
