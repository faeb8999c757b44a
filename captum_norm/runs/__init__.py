"""Runs long work over text in blocks, here or by workers on Ray; a run that was killed goes on where it stopped."""

from captum_norm.runs.blocks import Block, LineReader, Part, block_of, cut
from captum_norm.runs.job import Backend, Job, Parts, RayBackend, Work
from captum_norm.runs.journal import Identity, Journal, Record, published
from captum_norm.runs.run import run_job

__all__ = [
    "Backend",
    "Block",
    "Identity",
    "Job",
    "Journal",
    "LineReader",
    "Part",
    "Parts",
    "RayBackend",
    "Record",
    "Work",
    "block_of",
    "cut",
    "published",
    "run_job",
]
