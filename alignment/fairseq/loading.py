"""A checkpoint and the files beside it → a model and its tokenizer."""

from pathlib import Path
from typing import Literal

from alignment.fairseq.architecture import TranslationModel, weight
from alignment.fairseq.checkpoint import Checkpoint, read_checkpoint
from alignment.fairseq.conversion import build_model
from alignment.fairseq.dictionary import Dictionary, find_dictionary, read_dictionary
from alignment.fairseq.segmentation import Codes, Segmenter, StrPath, find_segmenter
from alignment.fairseq.tokenizer import FairseqTokenizer
from captum_norm import InvalidInputError


def load_fairseq_checkpoint(
    path: StrPath, data: StrPath, *, codes: Codes = None
) -> tuple[TranslationModel, FairseqTokenizer]:
    """Load a translation model of fairseq, without fairseq, as a model of transformers with the same logits.

    Nothing in the file is run. A post-norm Transformer becomes a ``MarianMTModel``, a pre-norm one a
    ``PegasusForConditionalGeneration``, in float32 and in ``eval()`` mode. Pad its inputs on the right, and begin the
    decoder's with ``</s>``, id 2.

    Args:
        path: a ``.pt`` file that ``fairseq-train`` or ``fairseq-hydra-train`` wrote, 0.9 to 0.12.
        data: the folder that ``fairseq-preprocess`` wrote, with ``dict.LANGUAGE.txt``; and, unless ``codes`` says
            otherwise, what cut the words into pieces: a ``*.model`` of SentencePiece or the codes of subword-nmt or
            fastBPE (``codes``, ``bpecodes``, ``NAME.codes``), one for both languages or one for each, with the
            language in the name.
        codes: the file that cut the words, or one each for source and target; False if your words are pieces already.

    Returns:
        The model and its tokenizer.

    Raises:
        InvalidInputError: a file is missing, damaged or could run code; the model is of a kind that has no
            counterpart; or the dictionaries are not the model's.
    """
    folder = Path(data)
    if not folder.is_dir():
        raise InvalidInputError(f"there is no folder {folder}; give data=FOLDER, the one that fairseq-preprocess wrote")
    return assemble(read_checkpoint(Path(path)), folder, codes)


def assemble(checkpoint: Checkpoint, data: Path, codes: Codes = None) -> tuple[TranslationModel, FairseqTokenizer]:
    """The model of a checkpoint, and the tokenizer made from the files in a folder."""
    source_codes, target_codes = codes if isinstance(codes, tuple) else (codes, codes)
    source = _side(checkpoint, "source_lang", "encoder", data, source_codes)
    target = _side(checkpoint, "target_lang", "decoder", data, target_codes)
    return build_model(checkpoint.settings, checkpoint.weights), FairseqTokenizer(source, target)


def _side(
    checkpoint: Checkpoint, setting: str, part: str, data: Path, codes: StrPath | Literal[False] | None
) -> tuple[str, Dictionary, Segmenter]:
    language = checkpoint.settings.get(setting)
    if not isinstance(language, str):
        raise InvalidInputError(f"the checkpoint's {setting} is {language!r}, expected the name of a language")
    rows = len(weight(checkpoint.weights, f"{part}.embed_tokens.weight"))
    dictionary = read_dictionary(find_dictionary(data, language), rows)
    return language, dictionary, find_segmenter(data, language, dictionary, codes)
