"""The public names of both packages as stubs: ``python -m tests.public_interface`` writes those of a new release.

Public are the names of the packages' ``__init__.pyi``, their constructors, properties and fields, and their methods
with more than a line of documentation.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PACKAGES = ("captum_norm", "alignment")
RELEASED = ROOT / "tests" / "released"

_FIELDS = {"dataclass-field", "property"}
_MARKS = {"variadic positional": "*", "variadic keyword": "**"}


def interface(*, documented: bool = True) -> dict[str, str]:
    """The stubs of the packages; with methods that have no more than a line of documentation if not ``documented``."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases(external=False)
    modules = loader.modules_collection
    return {name: "\n".join(_stubs(modules[name], least=2 if documented else 0)) + "\n" for name in PACKAGES}


def _stubs(module: griffe.Module, least: int) -> Iterator[str]:
    """The stubs of a package, with methods that have at least so many lines of documentation."""
    names = (ROOT / module.name / "__init__.pyi").read_text(encoding="utf-8")
    for name in re.findall(r" as (\w+)$", names, re.MULTILINE):
        target = _target(module.members[name])
        if not isinstance(target, griffe.Class):
            yield _line(name, target)
            continue
        yield f"class {name}:"
        members = (_line(name, _target(member)) for name, member in _members(target, least))
        yield from (f"    {line}" for line in members)
        yield "    ..."


def _members(kind: griffe.Class, least: int) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    for name, member in sorted(kind.all_members.items()):
        own = (base.members[name].docstring for base in (kind, *kind.mro()) if name in base.members)
        lines: list[str] = next((docstring.lines for docstring in own if docstring), [])
        method = member.is_function and len(lines) >= least
        if name == "__init__" or (not name.startswith("_") and (method or _FIELDS & member.labels)):
            yield name, member


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def _line(name: str, member: griffe.Object) -> str:
    parameters = f"def {name}({', '.join(_parameters(member))})" if isinstance(member, griffe.Function) else name
    return f"{parameters}: ..."


def _parameters(function: griffe.Function) -> Iterator[str]:
    kinds = [str(parameter.kind and parameter.kind.value) for parameter in function.parameters]
    for place, (parameter, kind) in enumerate(zip(function.parameters, kinds, strict=True)):
        if kind == "keyword-only" and not {"keyword-only", "variadic positional"} & set(kinds[:place]):
            yield "*"
        default = "" if parameter.default is None or kind in _MARKS else f"={parameter.default}"
        yield f"{_MARKS.get(kind, '')}{parameter.name}{default}"


if __name__ == "__main__":
    for package, text in interface().items():
        (RELEASED / f"{package}.txt").write_text(f"# {version('captum-norm')}\n{text}", encoding="utf-8")
