"""Checks that a tag is a release, and says where its archives come from: ``python .ci/release.py v1.2.3``.

The version is that of pyproject.toml: an archive of the source and a clone without tags have it, too. With archives in
``dist/``, writes ``build/provenance``: their checksums, an in-toto statement (SLSA 1.0) of the commit and the versions
that they were built from, what has changed, and the conda recipe. The workflow signs an attestation of the archives.
"""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONDA = {"matplotlib": "matplotlib-base", "torch": "pytorch"}


def expect(condition: object, message: str) -> None:
    """End with a message unless a condition holds."""
    if not condition:
        raise SystemExit(f"this is no release: {message}")


def commit_of(name: str) -> str:
    """The commit of a tag; nothing if there is none."""
    done = subprocess.run(["git", "rev-list", "-n", "1", name], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def changes(version: str, text: str) -> str:
    """What the changelog has of a version; refuses a version without a date."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    dated = [section for section in sections if re.match(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n", section)]
    expect(len(dated) == 1, f"CHANGELOG.md has no section [{version}] with a date")
    return dated[0].partition("\n")[2].strip() + "\n"


def conda(dependencies: list[str]) -> str:
    """The lines of a conda recipe for requirements of pip."""
    pairs = (requirement.split(">=") for requirement in dependencies)
    return "\n".join(f"    - {CONDA.get(name, name)} >={bound}" for name, bound in pairs)


def main(tag: str | None) -> None:
    """Check, and write what is known of the archives."""
    names = ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", ".github/conda/recipe.yaml")
    settings, changelog, citation, recipe = ((ROOT / name).read_text(encoding="utf-8") for name in names)
    project = tomllib.loads(settings)["project"]
    version = project["version"]
    new = changes(version, changelog)
    expect(f"\nversion: {version}\n" in citation, f"CITATION.cff has another version than {version}")
    expect(tag in (None, f"v{version}"), f"the tag is {tag}, the version {version}")
    commit = commit_of("HEAD")
    expect(tag is None or commit_of(tag) == commit, f"{tag} is not the commit that is checked out, {commit}")
    archives = sorted((ROOT / "dist").glob("captum_norm*"))
    if not archives:
        return
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives}
    pinned = hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://github.com/captum-norm/captum-norm/blob/main/CONTRIBUTING.md#releases",
                "externalParameters": {"tag": tag, "version": version},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    {"name": "constraints.txt", "digest": {"sha256": pinned}},
                ],
            },
            "runDetails": {"builder": {"id": f"make release-check, Python {sys.version.split()[0]}"}},
        },
    }
    folder = ROOT / "build" / "provenance"
    folder.mkdir(parents=True, exist_ok=True)
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    source = next(digest for name, digest in digests.items() if name == f"captum_norm-{version}.tar.gz")
    filled = recipe.replace("VERSION", version).replace("SHA256", source)
    files = {
        "SHA256SUMS": sums,
        "CHANGES.md": new,
        "provenance.intoto.json": json.dumps(statement, indent=2) + "\n",
        "recipe.yaml": filled.replace("    - DEPENDENCIES", conda(project["dependencies"])),
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None)
