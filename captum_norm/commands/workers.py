"""Declares the options of runs that workers on Ray can share, and tells how far a run is."""

import argparse
import os
from pathlib import Path

from captum_norm.commands.numbers import amount, natural, positive
from captum_norm.commands.outputs import output_path
from captum_norm.errors import InvalidInputError
from captum_norm.runs import Backend, Journal, RayBackend, describe
from captum_norm.text.files import is_url, place_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that :func:`backend_of` reads, and ``--log``."""
    group = parser.add_argument_group("the workers")
    group.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="share the work among N processes, on this machine or the cluster (default: this process; on a cluster, "
        "as many as it has room for)",
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        default=os.environ.get("RAY_ADDRESS"),
        help="the Ray cluster to run on: auto for that of this machine (default: $RAY_ADDRESS, or none)",
    )
    group.add_argument(
        "--cpus-per-worker", type=positive, metavar="N", help="cores for each worker, and its threads (default: 1)"
    )
    group.add_argument(
        "--gpus-per-worker",
        type=amount,
        default=0.0,
        metavar="N",
        help="GPUs for each worker, or a share of one, such as 0.5; the model then runs on cuda (default: 0)",
    )
    group.add_argument(
        "--retries",
        type=natural,
        default=2,
        metavar="N",
        help="how often a block is begun again whose worker died (default: %(default)s)",
    )
    group.add_argument(
        "--skip-bad-blocks",
        action="store_true",
        help="set aside a block whose workers died as often as that, rather than end the run",
    )
    group.add_argument("--log", type=output_path([".jsonl"]), metavar="FILE.jsonl", help="append the run's events")


def backend_of(options: argparse.Namespace) -> Backend:
    """Where the run takes place: here, unless workers or a cluster are asked for."""
    if options.workers is None and not options.ray:
        return "local"
    threads = getattr(options, "threads", None)
    return RayBackend(
        workers=options.workers,
        address=options.ray or None,
        cpus_per_worker=options.cpus_per_worker or threads or 1,
        gpus_per_worker=options.gpus_per_worker,
        retries=options.retries,
        skip_bad_blocks=options.skip_bad_blocks,
    )


def device_of(options: argparse.Namespace) -> str:
    """The device of the model: that of ``--device``, or cuda if each worker has a GPU."""
    device: str = options.device
    return "cuda" if options.gpus_per_worker and device == "cpu" else device


def status_of(output: str) -> str:
    """Describe how far the run that makes an output is, in a line.

    Raises:
        InvalidInputError: there is neither a run nor its output.
    """
    journal = Journal(output if is_url(output) else str(Path(output).resolve()), {})
    if journal.has_job():
        status = journal.read_status()
        return f"{output}: {'started a moment ago' if status is None else describe(status)}"
    if place_of(output).kind() == "file" or Path(output).exists():
        return f"{output} is complete"
    raise InvalidInputError(f"there is neither {output} nor {journal.folder}, the folder of its run")
