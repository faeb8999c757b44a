"""Reads word alignments off translation models; scores, symmetrises and writes them."""

from importlib import import_module
from typing import TYPE_CHECKING

from alignment.aer import AER, AERScore, alignment_error_rate
from alignment.corpora import ALIBI_STORIES, ParallelGold, load_alibi, read_rwth, read_wpt03
from alignment.decoding import (
    DECODERS,
    argmax,
    hmm_posteriors,
    hmm_viterbi,
    mutual_argmax,
    mutual_hmm,
    mutual_posterior,
    threshold,
)
from alignment.formats import (
    GoldFormat,
    TextSource,
    format_pharaoh,
    parse_pharaoh,
    parse_talp,
    read_gold,
    read_identified,
    read_parallel,
    read_pharaoh,
    split_words,
    write_pharaoh,
)
from alignment.huggingface import HuggingFaceTokenizer
from alignment.links import Alignment, GoldAlignment, Link
from alignment.normalization import NormalizedWords, normalize_word
from alignment.pieces import PIECE_SCHEMES, PieceScheme
from alignment.recipes import RECIPES, Recipe
from alignment.selection import Choice, consistency
from alignment.settings import Setting
from alignment.significance import Significance, paired_significance
from alignment.subwords import encode_words, merge_pieces, word_ids_from_offsets, word_ids_from_pieces
from alignment.symmetrization import (
    SYMMETRIZATIONS,
    grow,
    grow_diag,
    grow_diag_final,
    grow_diag_final_and,
    intersection,
    union,
)
from alignment.tokenization import EncodedSentence, TranslationTokenizer
from alignment.word_maps import WordMap, diagonal_prior, normalize_rows, sinkhorn, smoothed_product, weighted_sum

__all__ = [
    "AER",
    "ALIBI_STORIES",
    "DECODERS",
    "PIECE_SCHEMES",
    "RECIPES",
    "SYMMETRIZATIONS",
    "AERScore",
    "Alignment",
    "Choice",
    "EncodedSentence",
    "FairseqTokenizer",
    "GoldAlignment",
    "GoldFormat",
    "HuggingFaceTokenizer",
    "Link",
    "NormalizedWords",
    "ParallelGold",
    "PieceScheme",
    "Recipe",
    "Setting",
    "Significance",
    "TextSource",
    "TranslationTokenizer",
    "WordAligner",
    "WordMap",
    "alignment_error_rate",
    "argmax",
    "consistency",
    "diagonal_prior",
    "encode_words",
    "format_pharaoh",
    "grow",
    "grow_diag",
    "grow_diag_final",
    "grow_diag_final_and",
    "hmm_posteriors",
    "hmm_viterbi",
    "intersection",
    "load_alibi",
    "load_fairseq_checkpoint",
    "load_shipped_model",
    "merge_pieces",
    "mutual_argmax",
    "mutual_hmm",
    "mutual_posterior",
    "normalize_rows",
    "normalize_word",
    "paired_significance",
    "parse_pharaoh",
    "parse_talp",
    "read_gold",
    "read_identified",
    "read_parallel",
    "read_pharaoh",
    "read_rwth",
    "read_wpt03",
    "shipped_models",
    "sinkhorn",
    "smoothed_product",
    "split_words",
    "threshold",
    "translate",
    "union",
    "weighted_sum",
    "word_ids_from_offsets",
    "word_ids_from_pieces",
    "write_pharaoh",
]

if TYPE_CHECKING:
    from alignment.aligner import WordAligner
    from alignment.fairseq import FairseqTokenizer, load_fairseq_checkpoint
    from alignment.shipped import load_shipped_model, shipped_models
    from alignment.translation import translate
else:
    # These need torch and transformers, which take seconds to load: files, scores and --help do without.
    _LATE = {
        "FairseqTokenizer": "alignment.fairseq",
        "WordAligner": "alignment.aligner",
        "load_fairseq_checkpoint": "alignment.fairseq",
        "load_shipped_model": "alignment.shipped",
        "shipped_models": "alignment.shipped",
        "translate": "alignment.translation",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LATE[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})
