"""Public names go, or change incompatibly, after two releases that deprecated them, and the changelog says so."""

import re
from collections.abc import Iterator, Mapping

import pytest
from packaging.version import Version

griffe = pytest.importorskip("griffe")
from tests.public_interface import PACKAGES, RELEASED, ROOT, interface  # noqa: E402 - it imports griffe

Changelog = Mapping[str, Mapping[str, str]]
PROMISED = Version("0.3")
"""From this version on, what is removed or changed incompatibly was deprecated in two releases before."""


def sections(text: str) -> Changelog:
    """The text under each heading of each version in a changelog, the latest first."""
    _, *versions = re.split(r"^## \[(.+?)\].*$", text, flags=re.MULTILINE)
    parts = {
        name: re.split(r"^### (.+)$", part, flags=re.MULTILINE)
        for name, part in zip(versions[::2], versions[1::2], strict=True)
    }
    return {name: dict(zip(each[1::2], each[2::2], strict=True)) for name, each in parts.items()}


def complaints(released: str, current: str, changelog: Changelog) -> Iterator[str]:
    """What the changelog lacks about names that were removed or changed incompatibly since the last release."""
    before, now = (griffe.visit("stubs", ROOT / "stubs.pyi", text) for text in (released, current))
    unreleased, last, *earlier = changelog
    told = "".join(changelog[unreleased].get(heading, "") for heading in ("Changed", "Removed"))
    deprecated = "".join(changelog[version].get("Deprecated", "") for version in earlier)
    for breakage in griffe.find_breaking_changes(before, now):
        path = breakage.obj.path.removeprefix("stubs.").removesuffix(".__init__")
        parameter = next(
            (each.name for each in (breakage.old_value, breakage.new_value) if hasattr(each, "name")), None
        )
        names = {path.rpartition(".")[2], *([f"{parameter}="] if parameter else [])}
        named = re.compile(rf"`[^`]*\b({'|'.join(names)})")
        if not named.search(told):
            yield f"{path}: {breakage.kind.value.lower()}; say so in the changelog, under Changed or Removed"
        if Version(last) >= PROMISED and not named.search(deprecated):
            yield f"{path}: {breakage.kind.value.lower()}, but no two releases deprecated it"


def test_what_changed_since_the_last_release_is_in_the_changelog() -> None:
    changelog = sections((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    current, last = interface(documented=False), list(changelog)[1]
    for package in PACKAGES:
        released = (RELEASED / f"{package}.txt").read_text(encoding="utf-8")
        assert released.startswith(f"# {last}\n"), "write those of the release: python -m tests.public_interface"
        assert list(complaints(released, current[package], changelog)) == []


def test_names_go_after_two_releases_that_deprecated_them() -> None:
    before, now = "def one(a, b=1): ...\ndef two(): ...\n", "def one(a): ...\n"
    log = "# Log\n## [Unreleased]\n{}## [0.5.0] - day\n{}## [0.4.0]\n{}## [0.3.0]\n"
    gone, old = "### Removed\n\n- `one(b=)` and `two`.\n", "### Deprecated\n\n- `one(b=)`, `two`: nobody needs them.\n"
    assert not list(complaints(before, now, sections(log.format(gone, "", old))))
    assert [line[:5] for line in complaints(before, now, sections(log.format(gone, old, "")))] == ["one: ", "two: "]
    assert len(list(complaints(before, now, sections(log.format("", "", old))))) == 2
    assert not list(complaints(before, before + "def three(): ...\n", sections(log.format("", "", ""))))
