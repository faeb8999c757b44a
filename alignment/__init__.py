"""Word alignments: files and formats, gold alignments and their error rate, symmetrisation, and word maps."""

from alignment.aer import AER, AERScore, alignment_error_rate
from alignment.decoding import DECODERS, argmax, hmm_viterbi, mutual_argmax, mutual_hmm, threshold
from alignment.formats import (
    GoldFormat,
    TextSource,
    format_pharaoh,
    parse_pharaoh,
    parse_talp,
    read_gold,
    read_parallel,
    read_pharaoh,
    split_words,
    write_pharaoh,
)
from alignment.links import Alignment, GoldAlignment, Link
from alignment.pieces import PIECE_SCHEMES, PieceScheme
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
from alignment.word_maps import WordMap, diagonal_prior, normalize_rows, sinkhorn, weighted_sum

__all__ = [
    "AER",
    "DECODERS",
    "PIECE_SCHEMES",
    "SYMMETRIZATIONS",
    "AERScore",
    "Alignment",
    "GoldAlignment",
    "GoldFormat",
    "Link",
    "PieceScheme",
    "TextSource",
    "WordMap",
    "alignment_error_rate",
    "argmax",
    "diagonal_prior",
    "encode_words",
    "format_pharaoh",
    "grow",
    "grow_diag",
    "grow_diag_final",
    "grow_diag_final_and",
    "hmm_viterbi",
    "intersection",
    "merge_pieces",
    "mutual_argmax",
    "mutual_hmm",
    "normalize_rows",
    "parse_pharaoh",
    "parse_talp",
    "read_gold",
    "read_parallel",
    "read_pharaoh",
    "sinkhorn",
    "split_words",
    "threshold",
    "union",
    "weighted_sum",
    "word_ids_from_offsets",
    "word_ids_from_pieces",
    "write_pharaoh",
]
