"""Runs long work over text in blocks, which several processes can share and a later run can resume; without torch."""

from captum_norm.runs.journal import Job, Journal, Record, TextBlock
from captum_norm.runs.team import check_rank, torchrun_rank
from captum_norm.runs.work import Save, work_through

__all__ = [
    "Job",
    "Journal",
    "Record",
    "Save",
    "TextBlock",
    "check_rank",
    "torchrun_rank",
    "work_through",
]
