"""Loads fairseq translation models without fairseq."""

from alignment.fairseq.conversion import TranslationModel
from alignment.fairseq.loading import load_fairseq_checkpoint
from alignment.fairseq.tokenizer import Codes, FairseqTokenizer

__all__ = ["Codes", "FairseqTokenizer", "TranslationModel", "load_fairseq_checkpoint"]
