"""Runs long work over text in blocks, here or by workers on Ray; a run that was killed goes on where it stopped."""

from captum_norm.runs.backend import Backend, RayBackend
from captum_norm.runs.blocks import Block, LineReader, Part, block_of, cut
from captum_norm.runs.job import Attempt, Job, Parts, Work
from captum_norm.runs.journal import Identity, Journal, Record
from captum_norm.runs.monitor import describe
from captum_norm.runs.output import published
from captum_norm.runs.ray_data import BlockWorker, SharedJob, share
from captum_norm.runs.run import run_job

__all__ = [
    "Attempt",
    "Backend",
    "Block",
    "BlockWorker",
    "Identity",
    "Job",
    "Journal",
    "LineReader",
    "Part",
    "Parts",
    "RayBackend",
    "Record",
    "SharedJob",
    "Work",
    "block_of",
    "cut",
    "describe",
    "published",
    "run_job",
    "share",
]
