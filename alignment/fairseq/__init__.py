"""Loads fairseq translation models without fairseq."""

from alignment.fairseq.architecture import TranslationModel
from alignment.fairseq.loading import load_fairseq_checkpoint
from alignment.fairseq.segmentation import Codes
from alignment.fairseq.tokenizer import FairseqTokenizer

__all__ = ["Codes", "FairseqTokenizer", "TranslationModel", "load_fairseq_checkpoint"]
