"""The way of one call through the files does not grow: these limits may only be lowered."""

import pytest

from benchmarks.walk import calls, walk_of

# Files, changes of file, depth.
LIMITS = {
    "NormAttribution.attribute, BERT": (22, 134, 15),
    "atb_ff_res, LLaMA": (25, 201, 16),
    "DecompX to a logit, BERT": (21, 164, 15),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_warm_call_goes_through_few_files(name: str) -> None:
    call, package = next((call, package) for named, call, package in calls() if named == name)
    walk = walk_of(call, package)
    measured = (len(walk.files), walk.changes, walk.depth)
    assert all(number <= limit for number, limit in zip(measured, LIMITS[name], strict=True)), measured
