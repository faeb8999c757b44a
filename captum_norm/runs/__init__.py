"""Runs long work over text in blocks, here or by workers on Ray; a run that was killed goes on where it stopped."""

from captum_norm.runs.blocks import Block, Part, cut
from captum_norm.runs.job import Backend, Job, RayBackend
from captum_norm.runs.journal import Identity, Journal, Record
from captum_norm.runs.run import run_job

__all__ = ["Backend", "Block", "Identity", "Job", "Journal", "Part", "RayBackend", "Record", "cut", "run_job"]
