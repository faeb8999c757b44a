"""Model folders with nonsense in them: one sentence that names the folder, from Python and on the command line."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import alignment.cli
from captum_norm import CaptumNormError, InvalidInputError, cli
from captum_norm.loading import load
from tests.fuzzing import FACTOR
from tests.tiny import WORDS, bert_config, save_tiny

SIZES: dict[str, Any] = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
}
HEADS: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
NONSENSE: tuple[Any, ...] = (
    *("pipeline", "x", "", "../x", "\0", None, True, 0, -1, 1.5, float("nan"), float("inf"), 10**12, -(10**12), 10**30),
    *([], [1], [[]], ["pipeline"], ["BertTokenizer"], ["a"] * 3, {}, {"a": 1}, {"0": "x"}),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of several kinds, with their tokenizers."""
    torch.manual_seed(0)
    size = len(WORDS)
    gpt2 = transformers.GPT2Config(
        vocab_size=size, n_embd=8, n_layer=1, n_head=2, n_positions=12, bos_token_id=2, eos_token_id=3
    )
    marian = transformers.MarianConfig(vocab_size=size, pad_token_id=0, decoder_start_token_id=0, **SIZES, **HEADS)
    models = {
        "bert": transformers.BertForSequenceClassification(bert_config()),
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "marian": transformers.MarianMTModel(marian),
    }
    return {name: save_tiny(model, tmp_path_factory.mktemp(name)) for name, model in models.items()}


def damaged(whole: Path, to: Path, damage: Callable[[Path], object]) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(whole, to)
    damage(to)
    return to


def setting(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps(content), encoding="utf-8")

    return change


def without(*names: str) -> Callable[[Path], object]:
    def remove(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({k: v for k, v in content.items() if k not in names}), encoding="utf-8")

    return remove


def content(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], object]:
    def save(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return save


QUERY = "bert.encoder.layer.0.attention.self.query.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture that is a function": (
        setting(architectures=["pipeline"]),
        "the architecture pipeline, which is no model",
    ),
    "architecture that is a tokenizer": (setting(architectures=["BertTokenizer"]), "which is no model"),
    "architecture of another kind": (setting(architectures=["GPT2LMHeadModel"]), ""),
    "width that is a word": (setting(hidden_size="x"), "hidden_size"),
    "no heads": (setting(num_attention_heads=0), ""),
    "null": (setting(hidden_size=None), ""),
    "a list": (setting(num_hidden_layers=[2]), "num_hidden_layers"),
    "negative": (setting(hidden_size=-8), ""),
    "not a number": (setting(hidden_size=float("nan")), "hidden_size"),
    "layers without end": (
        setting(num_hidden_layers=10**12),
        "got num_hidden_layers 1000000000000 in its configuration, expected at most",
    ),
    "layers for hours": (setting(num_hidden_layers=10**6), "got num_hidden_layers 1000000 in its configuration"),
    "vocabulary without end": (setting(vocab_size=10**12), "got vocab_size 1000000000000 in its configuration"),
    "labels without end": (setting(num_labels=10**9), "got num_labels 1000000000 in its configuration"),
    "inner numbers": (setting(sub_config={"depths": [2, 10**12]}), "got depths 1000000000000"),
    "missing type": (without("model_type"), ""),
    "unknown type": (setting(model_type="no-such"), "no-such"),
    "type that is a list": (setting(model_type=[]), ""),
    "dtype": (setting(dtype="pipeline"), ""),
    "truncated": (content("config.json", b'{"hidden_size": 8, "model_t'), ""),
    "no UTF-8": (content("config.json", b'{"model_type": "b\xe9rt"}'), ""),
    "nested": (content("config.json", b'{"a":' * 10**5 + b"1" + b"}" * 10**5), ""),
    "a list for names and values": (content("config.json", b"[1]"), ""),
    "empty configuration": (content("config.json", b""), ""),
    "huge header": (content("model.safetensors", struct.pack("<Q", 2**62) + b"{}"), "cannot load the weights"),
    "weights of words": (content("model.safetensors", b"not weights"), "cannot load the weights"),
    "no weights at all": (content("model.safetensors", b""), "cannot load the weights"),
    "missing tensor": (
        weights(lambda given: {k: v for k, v in given.items() if k != QUERY}),
        f"1 tensors of BertForSequenceClassification are missing or of another shape, {QUERY} for one",
    ),
    "tensor of another shape": (
        weights(lambda given: given | {QUERY: torch.ones(3, 8)}),
        "1 tensors of BertForSequenceClassification are",
    ),
    "no tokenizer": (without_tokenizer, "tokenizer"),
    "damaged tokenizer": (
        content("tokenizer.json", b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": 3}}'),
        "tokenizer",
    ),
    "tokenizer of words": (content("tokenizer.json", b"[[["), "tokenizer"),
    "length that is a list": (
        content("tokenizer_config.json", b'{"model_max_length": [1], "tokenizer_class": "PreTrainedTokenizerFast"}'),
        "tokenizer",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_told_of(name: str, whole: dict[str, Path], tmp_path: Path) -> None:
    damage, reason = DAMAGES[name]
    folder = damaged(whole["bert"], tmp_path / "model", damage)
    with pytest.raises(InvalidInputError) as caught:
        load(str(folder))
    message = str(caught.value)
    assert message.startswith(("cannot load the model", "cannot load the weights of", "cannot load a tokenizer for"))
    assert str(folder) in message
    assert reason in message
    assert len(message) < 600
    assert "\n" not in message


def test_weights_of_another_dtype_are_read(whole: dict[str, Path], tmp_path: Path) -> None:
    """Integers in the place of floating-point numbers are no weights of another shape, and numbers all the same."""
    folder = damaged(whole["bert"], tmp_path / "model", weights(lambda given: given | {QUERY: given[QUERY].double()}))
    assert load(str(folder))[0].get_parameter(QUERY).dtype == torch.float32


@pytest.mark.fuzz
def test_many_damaged_folders(whole: dict[str, Path], tmp_path: Path) -> None:
    """Whatever is wrong: a sentence that names the folder, or a model."""
    generator = random.Random(0)
    files = ["config.json"] * 8 + ["tokenizer_config.json", "tokenizer.json", "model.safetensors"]
    refused = 0
    for _ in range(120 * FACTOR):
        kind, name = generator.choice(sorted(whole)), generator.choice(files)
        folder = damaged(whole[kind], tmp_path / "model", lambda _: None)
        file = folder / name
        data, done = file.read_bytes(), [kind, name]
        if name.endswith("config.json") and generator.random() < 0.8:
            settings = json.loads(data)
            for key in generator.sample(sorted(settings), generator.choice([1, 1, 2])):
                settings[key] = generator.choice(NONSENSE)
                done.append(f"{key}={settings[key]!r}")
            file.write_text(json.dumps(settings), encoding="utf-8")
        else:
            changed = bytearray(data)
            for _ in range(generator.randrange(1, 6)):
                changed[generator.randrange(len(changed))] = generator.randrange(256)
            cut = generator.randrange(len(data))
            file.write_bytes(generator.choice([bytes(changed), data[:cut], data[cut:], generator.randbytes(90)]))
            done.append("bytes")
        try:
            load(str(folder))
        except CaptumNormError as error:
            message = str(error)
        except Exception as error:
            raise AssertionError(f"{done}: {error!r}") from error
        else:
            continue
        assert str(folder) in message, done
        assert "\n" not in message, done
        refused += 1
    assert 30 < refused / FACTOR < 120


@pytest.mark.parametrize(
    ("main", "words", "kind"),
    [
        (cli.main, ["explain", "a dog"], "bert"),
        (cli.main, ["compare", "a dog", "--methods=norm"], "bert"),
        (cli.main, ["analyze", "dispersion", "--limit=1"], "gpt2"),
        (cli.main, ["models", "--check"], "gpt2"),
        (alignment.cli.main, ["extract", "pairs", "--quiet"], "marian"),
        (alignment.cli.main, ["translate", "pairs", "--quiet"], "marian"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_tell_of_it(
    main: Callable[[list[str]], int],
    words: list[str],
    kind: str,
    whole: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs").write_text("a dog ||| the cat\n", encoding="utf-8")
    option = [] if words[0] == "models" else ["--model"]
    for damage in (setting(architectures=["pipeline"]), setting(vocab_size=10**12), content("model.safetensors", b"")):
        folder = damaged(whole[kind], tmp_path / "model", damage)
        assert main([*words, *option, str(folder)]) == 2
        output, said = capsys.readouterr()
        assert output == ""
        assert said.count("\n") == 1
        assert str(folder) in said


@pytest.mark.parametrize("command", ["extract", "translate", "explain"])
def test_ids_beyond_the_embedding(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer is that of another model."""
    monkeypatch.chdir(tmp_path)
    Path("pairs").write_text("a dog ||| the cat\n", encoding="utf-8")
    config = transformers.MarianConfig(
        vocab_size=6, pad_token_id=0, decoder_start_token_id=0, eos_token_id=3, **SIZES, **HEADS
    )
    small = transformers.BertConfig(**bert_config().to_dict() | {"vocab_size": 6})
    model = transformers.BertModel(small) if command == "explain" else transformers.MarianMTModel(config)
    folder = save_tiny(model, tmp_path / "model")
    main = cli.main if command == "explain" else alignment.cli.main
    given = "a dog runs" if command == "explain" else "pairs"
    option = ["--layer=0", "--quiet"] if command == "extract" else ["--quiet"] if command == "translate" else []
    assert main([command, given, "--model", str(folder), *option]) == 2
    output, said = capsys.readouterr()
    assert output == ""
    assert "got the token id " in said
    assert "knows the ids 0 to 5" in said
