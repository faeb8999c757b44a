"""Checks that a release can be made: ``python -m tests.release DIRECTORY`` (``make release-check``).

Builds the source archive, and the wheel from it, into the directory; checks both; installs the wheel into a fresh
environment with the versions of ``constraints.txt``; and runs there, outside of the clone, what the README shows.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata

from tests.test_readme import PROGRAMS, ROOT, blocks, commands, write_story

README = ROOT / "README.md"


def say(text: str) -> None:
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


def run(words: Sequence[str | Path], **options: Any) -> None:
    """Run a command; end with its exit status when it fails."""
    if status := subprocess.run([str(word) for word in words], check=False, **options).returncode:
        sys.exit(f"this ended with {status}: {' '.join(map(str, words))}")


def build(directory: Path) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it rather than from the clone."""
    run([sys.executable, "-m", "build", "--outdir", directory, ROOT])
    (archive,) = directory.glob("*.tar.gz")
    (wheel,) = directory.glob("*.whl")
    run([sys.executable, "-m", "twine", "check", "--strict", archive, wheel])
    return archive, wheel


def complaints(archive: Path, wheel: Path, changelog: str) -> list[str]:
    """What is wrong with the files of a release, and with what the changelog says of it."""
    names = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(archive) as opened:
        sources = {name.partition("/")[2] for name in opened.getnames()}
    metadata = Metadata.from_email(
        zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("/METADATA")))
    )
    found = []
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    if packages != {"alignment", "captum_norm"}:
        found.append(f"the wheel has {sorted(packages)}, not alignment and captum_norm alone")
    needless = [name for name in names if re.search(r"/(tests|script|node_modules)/|\.(js\.map|ts)$", name)]
    if needless:
        found.append(f"the wheel has files that nobody runs: {needless[:3]}")
    wanted = {"captum_norm/py.typed", "alignment/py.typed"}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "captum_norm").rglob("show/assets/*")}
    if missing := wanted - set(names):
        found.append(f"the wheel lacks {sorted(missing)}")
    if missing := {"LICENSE", "CHANGELOG.md", "tests/release.py", "pyproject.toml"} - sources:
        found.append(f"the source archive lacks {sorted(missing)}")
    if not re.search(rf"^## \[{re.escape(str(metadata.version))}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no dated section [{metadata.version}]")
    if re.search(r"^## \[Unreleased\]\n+(?!## )\S", changelog, re.MULTILINE):
        found.append("CHANGELOG.md still has changes under Unreleased")
    return found


def install(wheel: Path, environment: Path) -> None:
    """The wheel with the extra that the README's examples use, and nothing of this environment."""
    venv.create(environment, with_pip=True)
    requirement = f"captum-norm[demo] @ {wheel.as_uri()}"
    run([environment / "bin" / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", requirement])
    run([environment / "bin" / "pip", "check"])


def follow_readme(environment: Path, folder: Path) -> None:
    """Run the README's commands and Python in a folder that has but the reader's own files."""
    write_story(folder, "story")
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    path = f"{environment / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    settings = {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    for words in commands(README):
        if words[0] in PROGRAMS:
            say(" ".join(words))
            run([environment / "bin" / words[0], *words[1:]], cwd=folder, env=settings)
    script = folder / "readme.py"
    script.write_text("\n".join(block for block in blocks(README, "python") if ">>>" not in block), encoding="utf-8")
    say("the README's Python")
    run([environment / "bin" / "python", "-W", "error::DeprecationWarning:__main__", script], cwd=folder, env=settings)


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if old := [path.name for path in directory.iterdir()]:
        sys.exit(f"{directory} must be empty, but has {', '.join(sorted(old)[:3])}: remove what is not to be released")
    say(f"Building into {directory}")
    archive, wheel = build(directory)
    if found := complaints(archive, wheel, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        sys.exit("\n".join(found))
    for path in (archive, wheel):
        say(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory(prefix="captum-norm-release-") as temporary:
        environment, folder = Path(temporary) / "venv", Path(temporary) / "empty"
        folder.mkdir()
        say(f"Installing {wheel.name} into a fresh environment")
        install(wheel, environment)
        follow_readme(environment, folder)
    say("A release can be made of these files")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
