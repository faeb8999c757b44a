"""Which model a command loads, what it says of those that it cannot load, and what tells two models apart."""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment.commands import models
from alignment.fairseq import FairseqTokenizer
from alignment.fairseq.loading import load_shipped_model
from alignment.huggingface import HuggingFaceTokenizer
from alignment.normalization import NormalizedWords
from captum_norm import InvalidInputError
from tests.alignment.commands.texts import set_stdin
from tests.alignment.fairseq.small import save_checkpoint, weights
from tests.alignment.translation_models import FAMILIES, random_model
from tests.commands import calls
from tests.tiny import bert_config, save_tiny


def parsed(*words: str) -> models.ModelOptions:
    return calls.parsed(models.ModelOptions, *words)


def run_options(*words: str) -> models.RunOptions:
    return calls.parsed(models.RunOptions, *words)


def load(*words: str) -> tuple[Any, Any]:
    return models.load(parsed(*words))


def same(model: Any, other: Any) -> bool:
    """Whether two models have the same weights."""
    state = other.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.fixture
def fairseq(tmp_path: Path) -> Path:
    """A checkpoint, its dictionaries beside it."""
    return save_checkpoint(tmp_path)


def saved(name: str, folder: Path) -> tuple[Path, Any]:
    """A folder with a random model of a family, and the model."""
    tokenizer = FAMILIES[name].tokenizer(folder)
    model = random_model(FAMILIES[name], tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model", model


def test_models_of_this_package() -> None:
    Path("fr-en").mkdir()  # a folder would be ./fr-en
    for words, name in (([], "fr-en"), (["--model=fr-en"], "fr-en"), (["--model=en-fr"], "en-fr")):
        model, tokenizer = load(*words)
        assert isinstance(tokenizer, NormalizedWords)
        assert f"{tokenizer.source_language}-{tokenizer.target_language}" == name
        assert not model.training
        assert same(model, load_shipped_model(name)[0])


def test_checkpoints_of_fairseq(fairseq: Path) -> None:
    codes, others = fairseq / "merges", fairseq / "others"
    codes.write_text("#version: 0.2\na b</w>\n", encoding="utf-8")
    others.write_text("#version: 0.2\nc d</w>\n", encoding="utf-8")
    # Of "ab" and "ba" the first codes join one, the others none; without codes both are words.
    given = {
        (3, 3): [[], ["--codes=none"]],
        (4, 4): [[f"--codes={codes}"]],
        (4, 5): [[f"--codes={codes}", f"--codes={others}"]],
    }
    for lengths, words in ((lengths, words) for lengths, several in given.items() for words in several):
        model, tokenizer = load(f"--model={fairseq / 'model.pt'}", f"--data={fairseq}", *words)
        assert isinstance(tokenizer, FairseqTokenizer)
        assert torch.equal(model.state_dict()["lm_head.weight"], weights()["decoder.output_projection.weight"])
        encoded = (encode([["ab", "ba"]])[0].ids for encode in (tokenizer.encode_source, tokenizer.encode_target))
        assert tuple(map(len, encoded)) == lengths


def test_models_of_hugging_face(tmp_path: Path) -> None:
    folder, model = saved("NLLB", tmp_path)
    found, tokenizer = load(f"--model={folder}", "--source-language=deu_Latn", "--target-language=eng_Latn")
    assert same(model, found)
    assert not found.training
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    expected = HuggingFaceTokenizer(loaded, source_language="deu_Latn", target_language="eng_Latn")
    words = ["das", "Haus"]
    assert tokenizer.encode_source([words]) == expected.encode_source([words])
    assert tokenizer.encode_target([words]) == expected.encode_target([words])
    assert tokenizer.encode_source([words]) != tokenizer.encode_target([words])


def test_a_prefix_is_told_to_the_model(tmp_path: Path) -> None:
    folder, _ = saved("T5", tmp_path)
    _, plain = load(f"--model={folder}")
    _, told = load(f"--model={folder}", "--source-prefix=das Haus")
    [short], [long] = plain.encode_source([["klein"]]), told.encode_source([["klein"]])
    [prefix] = plain.encode_source([["das", "Haus"]])
    assert long.ids == prefix.ids[:-1] + short.ids
    assert long.word_ids == [None] * (len(prefix.ids) - 1) + short.word_ids


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model=x.pt"], "got no --data for x.pt; give the folder that fairseq-preprocess wrote"),
        (["--model=x.pt", "--data=."], "there is no file x.pt"),
        (["--model=x.pt", "--data=none"], "there is no folder none"),
        (["--model=x.pt", "--data=.", *["--codes=a"] * 3], "got --codes 3 times, expected once or twice"),
        (["--model=x.pt", "--source-prefix=a"], "--source-prefix is for a Hugging Face model; x.pt is a fairseq check"),
        (["--quantize=nf4"], "--quantize is for a Hugging Face model; fr-en is a shipped model"),
        (["--data=."], "--data is for a fairseq checkpoint; fr-en is a shipped model"),
        (["--model=./none"], r"cannot load the model \./none: there is no such folder"),
        (["--model="], "cannot load a model: its name is empty"),
        (["--device=none"], "cannot put the model on the device none: "),
    ],
)
def test_what_is_refused_is_said(words: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        load(*words)


SMALL: Any = {"layers": 1, "attention_heads": 2, "ffn_dim": 8}


def test_other_models_of_hugging_face_are_refused(tmp_path: Path) -> None:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SMALL.items()}
    tokens: Any = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    speech = transformers.WhisperConfig(vocab_size=40, d_model=8, **sizes, **tokens)
    for model in (transformers.BertModel(bert_config()), transformers.WhisperForConditionalGeneration(speech)):
        folder = tmp_path / type(model).__name__
        folder.mkdir()
        save_tiny(model, folder)
        with pytest.raises(InvalidInputError) as raised:
            load(f"--model={folder}")
        expected = "expected a translation model, an encoder–decoder that reads text; docs/how-to/align-formats.md says"
        assert str(raised.value).startswith(f"got {folder}, a {folder.name}; {expected}")


def identity(*words: str) -> dict[str, str | None]:
    options = parsed(*words)
    return models.identity(options, *models.load(options), options.device)


def test_two_checkpoints_are_told_apart_by_all_that_decides_the_alignments(fairseq: Path) -> None:
    codes, dictionary = fairseq / "merges", fairseq / "dict.fr.txt"
    codes.write_text("#version: 0.2\na b</w>\n", encoding="utf-8")
    words = f"--model={fairseq / 'model.pt'}", f"--data={fairseq}", f"--codes={codes}"
    first = identity(*words)
    assert {name: value for name, value in first.items() if name not in ("model", "configuration", "tokenizer")} == {
        "data": str(fairseq),
        "codes": str(codes),
        "source_language": None,
        "target_language": None,
        "source_prefix": None,
        "quantize": None,
        "device": "cpu",
    }
    assert str(first["model"]).startswith(f"{fairseq / 'model.pt'} (")
    assert identity(*words) == first
    lines = dictionary.read_text(encoding="utf-8").splitlines()
    changes: dict[str, list[Callable[[], object]]] = {
        "model": [lambda: save_checkpoint(fairseq, seed=1)],
        "configuration": [lambda: save_checkpoint(fairseq, activation_fn="gelu")],
        "tokenizer": [
            lambda: codes.write_text("#version: 0.2\nb a</w>\n", encoding="utf-8"),
            lambda: dictionary.write_text("\n".join([lines[1], lines[0], *lines[2:]]), encoding="utf-8"),
        ],
    }
    for name, ways in changes.items():
        for change in ways:
            kept = {path: path.read_bytes() for path in fairseq.iterdir()}
            change()
            now = identity(*words)
            assert [key for key in first if now[key] != first[key]] == [name]
            for path, content in kept.items():
                path.write_bytes(content)
    model, tokenizer = models.load(parsed(*words))
    assert models.identity(parsed(*words), model.bfloat16(), tokenizer, "cpu")["model"] != first["model"]
    assert models.identity(parsed(*words), model, tokenizer, "cuda:1")["device"] == "cuda"


def test_models_of_hugging_face_are_told_apart_by_their_files(tmp_path: Path) -> None:
    folder, _ = saved("M2M100", tmp_path)
    words = f"--model={folder}", "--source-language=de", "--target-language=en"
    first = identity(*words)
    assert identity(*words) == first
    for name, file, old, new in (
        ("configuration", "config.json", '"activation_function": "relu"', '"activation_function": "gelu"'),
        ("tokenizer", "vocab.json", '"<unk>": 3', '"<unk>": 2'),
    ):
        path = folder / file
        kept = path.read_text(encoding="utf-8")
        assert old in kept
        path.write_text(kept.replace(old, new), encoding="utf-8")
        now = identity(*words)
        assert [key for key in first if now[key] != first[key]] == [name]
        path.write_text(kept, encoding="utf-8")
    options = parsed(*words)
    model, tokenizer = models.load(options)
    tokenizer.encode_source([["das", "Haus"]])
    assert models.identity(options, model, tokenizer, "cpu") == first


def test_models_of_this_package_are_told_apart() -> None:
    first, second = identity("--model=fr-en"), identity("--model=en-fr")
    assert [name for name in first if first[name] != second[name]] == ["model", "tokenizer"]


def test_the_type_of_the_weights(tmp_path: Path) -> None:
    model, _ = load("--dtype=bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    folder, _ = saved("Marian", tmp_path)
    with pytest.raises(InvalidInputError, match="got --dtype float16 and --quantize int8; give one of them"):
        load(f"--model={folder}", "--dtype=float16", "--quantize=int8")


def test_threads_are_set_for_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    with suppress(KeyboardInterrupt), models.set_up(run_options(f"--threads={before + 1}")) as report:
        report(f"{torch.get_num_threads() - before} more")
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before
    with models.set_up(run_options("--quiet")) as report:
        assert torch.get_num_threads() == before
        report("nothing")
    assert capsys.readouterr() == ("", "1 more\n")


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, ["a"])
    assert models.text_source("-") is sys.stdin.buffer
    (tmp_path / "text").touch()
    assert models.text_source(str(tmp_path / "text")) == str(tmp_path / "text")
    for name, reason in {"": "it is a folder", "none": "there is no such file"}.items():
        path = tmp_path / name
        with pytest.raises(InvalidInputError, match=f"^cannot read {path}: {reason}$"):
            models.text_source(str(path))


def test_threads_end_where_the_system_could_not_start_them() -> None:
    assert run_options("--threads=1024").threads == 1024
    with pytest.raises(argparse.ArgumentError, match="argument --threads: got 1025; expected a number from 1 to 1024"):
        run_options("--threads=1025")


@pytest.mark.parametrize(
    ("files", "tool"),
    [
        (["model.npz", "decoder.yml"], "Marian"),
        (["model.bin", "shared_vocabulary.json", "config.json"], "CTranslate2"),
        (["model.bin", "source_vocabulary.txt", "target_vocabulary.txt"], "CTranslate2"),
        (["model.00.safetensors", "vocab.json", "config.json"], "Eole"),
        (["checkpoint", "ckpt-5000.index"], "OpenNMT-tf"),
    ],
)
def test_models_of_other_tools_are_named(tmp_path: Path, files: list[str], tool: str) -> None:
    (tmp_path / "model").mkdir()
    for name in files:
        (tmp_path / "model" / name).touch()
    with pytest.raises(InvalidInputError, match=f"a model of {tool}, which torch cannot run; .*align-formats.md says"):
        load(f"--model={tmp_path / 'model'}")
    if tool == "Marian":
        with pytest.raises(InvalidInputError, match="a model of Marian, which torch cannot run; convert it, or take"):
            load(f"--model={tmp_path / 'model' / 'model.npz'}")
