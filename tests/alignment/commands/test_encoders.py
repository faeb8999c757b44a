"""``norm-align`` with encoders: what Python gives, and what is refused."""

import csv
from pathlib import Path
from typing import Any

import pytest
import transformers

from alignment import Alignment, EncoderAligner, GoldAlignment, HuggingFaceTokenizer, alignment_error_rate, cli
from alignment.formats import read_pharaoh
from tests.alignment.commands.conftest import Printed, Refused
from tests.alignment.test_encoder import bert, gpt2, sentences, tokenizer
from tests.alignment.translation_models import FAMILIES, PAIRS, random_model


@pytest.fixture
def files() -> tuple[list[list[str]], list[list[str]]]:
    """Sentence pairs, and the folders of an encoder and of a model of the other kind."""
    for name, model in (("bert", bert(0, "BertForMaskedLM").float()), ("gpt2", gpt2())):
        model.save_pretrained(name)
        tokenizer().save_pretrained(name)
    sides = [list(side) for side in zip(*sentences(1), strict=True)]
    for name, side in zip(("source", "target"), sides, strict=True):
        Path(name).write_text("".join(f"{' '.join(words)}\n" for words in side), encoding="utf-8")
    return sides[0], sides[1]


def encoder() -> Any:
    return transformers.AutoModelForMaskedLM.from_pretrained("bert").eval()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--layer=1 --recipe=itermax", {"layer": 1, "recipe": "itermax"}),
        ("--recipe=softmax", {"recipe": "softmax"}),
        ("--layer=1 --method=norm --head=1", {"layer": 1, "source": "norm", "head": 1}),
        ("--method=alti --lexicon --page=links.html", {"source": "alti", "count_text": True}),
    ],
)
def test_a_folder_of_an_encoder_is_enough(words: str, options: dict[str, Any], files: Any, printed: Printed) -> None:
    printed("extract", "source", "target", "--model=bert", "--out=links", "--keep-sides", *words.split())
    aligner = EncoderAligner(encoder(), HuggingFaceTokenizer(tokenizer()), **options)
    assert list(read_pharaoh("links")) == aligner.align(*files)
    assert Path("links.html").exists() == ("--page" in words)


def test_the_encoder_of_a_translation_model(printed: Printed, tmp_path: Path) -> None:
    family = FAMILIES["NLLB"]
    model = random_model(family, made := family.tokenizer(tmp_path), seed=1)
    model.save_pretrained("nllb")
    made.save_pretrained("nllb")
    for name, side in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        Path(name).write_text("".join(f"{' '.join(words)}\n" for words in side), encoding="utf-8")
    languages = ("--source-language=deu_Latn", "--target-language=eng_Latn")
    printed(
        "extract", "source", "target", "--model=nllb", "--method=similarity", *languages, "--layer=0", "--out=links"
    )
    wrapped = HuggingFaceTokenizer(made, source_language="deu_Latn", target_language="eng_Latn")
    assert list(read_pharaoh("links")) == EncoderAligner(model, wrapped, 0).align(*zip(*PAIRS, strict=True))


def test_tags_by_an_encoder(files: Any, printed: Printed) -> None:
    Path("tagged").write_text(f"<b>{files[0][0][0]}</b> {' '.join(files[0][0][1:])}\n", encoding="utf-8")
    Path("plain").write_text(f"{' '.join(files[1][0])}\n", encoding="utf-8")
    output, _ = printed("transfer-tags", "tagged", "plain", "--model=bert", "--layer=1", "--recipe=argmax")
    assert output[0].replace("<b>", "").replace("</b>", "").split() == files[1][0]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model=gpt2", "got a GPT2Model, which reads one way only; expected an encoder, such as mBERT"),
        ("--model=bert --layer=3", "got layer 3; the model has 3: 0 to 2"),
        ("--model=bert --layer=0 --head=1", "got layer=0 and head=1; similarities are of whole layers"),
        ("--model=bert --setting=AWO", "got --setting, or --scope of similarities, for an encoder, which has none"),
        ("--model=bert --add-similarity", "got --add-similarity for an encoder; give a translation model, or omit it"),
        ("--model=bert --scope=attn", "got --setting, or --scope of similarities, for an encoder, which has none"),
        ("--model=bert --reverse-model=gpt2", "got bert, an encoder, which reads both sides; omit --reverse-model"),
        ("--model=bert --recipe=softmax --lexicon", "got a lexicon and a recipe with a null column or of pieces"),
        ("--model=bert --layer=0 --recipe=softmax --scores", "got scores and links that have no probabilities"),
        ("--model=bert --method=alti --head=1", "the method alti has no maps of single heads at the scope"),
        (
            "--recipe=softmax --reverse-model=none",
            "got a recipe of pieces; expected one of words, such as hmm, or an Enc",
        ),
    ],
)
def test_what_is_refused_is_one_sentence(words: str, message: str, refused: Refused) -> None:
    refused(message, "extract", "source", "target", *words.split())


@pytest.mark.usefixtures("files")
def test_commands_that_translate_need_a_translation_model(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["translate", "source"], ["inspect", "source", "target"], ["transfer-tags", "source"]):
        assert cli.main([*words, "--model=bert"]) == 2
        assert "got " in (error := capsys.readouterr().err)
        assert "bert" in error.lower()


def test_a_sweep_says_which_layer_aligns(files: Any, printed: Printed) -> None:
    Path("gold").write_text("".join("0-0\n" for _ in files[0]), encoding="utf-8")
    words = ["--gold=gold", "--gold-base=0", "--source=source", "--target=target", "--bootstrap=0", "--out=out"]
    output, _ = printed("sweep", "--model=bert", *words)
    made, gold = (encoder(), HuggingFaceTokenizer(tokenizer())), [GoldAlignment(Alignment([(0, 0)]))] * len(files[0])
    chosen = EncoderAligner(*made).choose(list(zip(*files, strict=True))).layer
    recipes = ("softmax", "argmax", "itermax", "hmm")
    rates = {
        (layer, recipe): alignment_error_rate(EncoderAligner(*made, layer, recipe=recipe).align(*files), gold).aer
        for layer in range(3)
        for recipe in recipes
    }
    assert len(set(rates.values())) > 4
    rows = [" ".join(line.split()) for line in output]
    for layer in range(3):
        numbers = " ".join(f"{rates[layer, recipe]:.1f}" for recipe in recipes)
        assert f"{layer}{', auto' * (layer == chosen)} {numbers}" in rows
    with Path("out/sweep.csv").open(encoding="utf-8", newline="") as file:
        written = {(int(row["layer"]), row["recipe"]): float(row["aer"]) for row in csv.DictReader(file)}
    assert written == pytest.approx(rates)
    assert [path.name for path in Path("out").iterdir()] == ["sweep.csv"]
    assert cli.main(["sweep", "--model=gpt2", *words]) == 2
