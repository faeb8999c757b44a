"""Alignments, translations and gradients of models that are adapted, quantised, offloaded or wrapped otherwise."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from alignment import HuggingFaceTokenizer, cli, translate
from alignment.aligner import WordAligner, without_head
from alignment.formats import format_pharaoh
from alignment.gradients import source_gradients
from alignment.teacher_forcing import attention_maps, teacher_forced_batches, word_maps
from captum_norm import NormAttribution, UnsupportedModelError
from captum_norm.loading import load_model
from tests.alignment.translation_models import FAMILIES, PAIRS, SOURCES, TARGETS, random_model

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

CPU = torch.device("cpu")


def made(name: str, folder: Path) -> SimpleNamespace:
    """A tokenizer of a family, and a function that builds its model."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer(folder)
    options = family.options
    return SimpleNamespace(
        folder=folder,
        plain=tokenizer,
        tokenizer=HuggingFaceTokenizer(tokenizer, **options),
        model=lambda: random_model(family, tokenizer),
        options=[word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)],
    )


def tuned(model: nn.Module, config: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).eval()


def lora(model: nn.Module, **options: Any) -> Any:
    linear = ["q", "v", "wi", "o"] if "T5" in type(model).__name__ else ["q_proj", "v_proj", "fc1", "out_proj"]
    return tuned(model, peft.LoraConfig(target_modules=linear, init_lora_weights=False, **options))


def everything(model: Any, tokenizer: HuggingFaceTokenizer) -> list[Any]:
    """What a model is used for: links, translations, gradients."""
    sources, targets = zip(*PAIRS, strict=True)
    links = WordAligner(model, tokenizer, setting="auto", head="all", recipe="mutual").align(sources, targets)
    translations = translate(model, tokenizer, sources, beam=2, max_length=8)
    (batch,) = teacher_forced_batches(model, tokenizer, PAIRS)
    return [links, translations, source_gradients(model, batch.inputs, batch.labels)]


def expect_same(found: list[Any], expected: list[Any]) -> None:
    assert found[:2] == expected[:2]
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)
    assert sum(map(len, found[0])) > 5


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "task"),
    [("Marian", None), ("M2M100", "SEQ_2_SEQ_LM"), ("BART", None), ("T5", "SEQ_2_SEQ_LM"), ("FSMT", None)],
)
def test_an_adapted_model_is_its_merged_one(name: str, task: str | None, tmp_path: Path) -> None:
    family = made(name, tmp_path)
    adapted = lora(family.model(), task_type=task)
    merged = deepcopy(adapted).merge_and_unload()
    expect_same(everything(adapted, family.tokenizer), everything(merged, family.tokenizer))


def dispatched(model: Any, folder: Path) -> Any:
    places = dict.fromkeys(["model.shared", "model.encoder", "lm_head", "final_logits_bias"], "cpu")
    places["model.decoder"] = "disk"
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


WRAP: dict[str, Callable[[Any, Path], Any]] = {
    "DataParallel": lambda model, _: nn.DataParallel(model),
    "compiled": lambda model, _: torch.compile(model, backend="eager"),
    "offloaded to memory": lambda model, _: accelerate.cpu_offload(model, execution_device=CPU),
    "offloaded to disk": lambda model, folder: accelerate.disk_offload(model, folder, execution_device=CPU),
    "decoder on disk": dispatched,
}


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:The following device_map keys")  # a buffer of the model itself
@pytest.mark.filterwarnings("ignore:You are calling .generate")  # of transformers before 5.21
@pytest.mark.parametrize("wrapper", WRAP)
def test_a_wrapped_model_is_the_one_inside(wrapper: str, tmp_path: Path) -> None:
    family = made("Marian", tmp_path)
    wrapped = WRAP[wrapper](family.model(), tmp_path / "weights")
    expect_same(everything(wrapped, family.tokenizer), everything(family.model(), family.tokenizer))


@pytest.mark.parametrize("name", ["Marian", "T5"])
def test_virtual_tokens_are_no_words(name: str, tmp_path: Path) -> None:
    """Those of a tuned prompt come first among the columns of cross-attention."""
    family = made(name, tmp_path)
    model = tuned(family.model(), peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3))
    sources, targets = ([pair[side] for pair in PAIRS] for side in (0, 1))
    (batch,) = teacher_forced_batches(model, family.tokenizer, PAIRS)
    with torch.no_grad():
        prompt = model.get_prompt(batch_size=len(PAIRS))[:, :3]  # the decoder's, which PEFT does not use, come after
        embedded = model.word_embeddings(batch.inputs["input_ids"])
    inputs = {key: value for key, value in batch.inputs.items() if key != "input_ids"} | {
        "inputs_embeds": torch.cat([prompt, embedded], 1),
        "attention_mask": torch.nn.functional.pad(batch.inputs["attention_mask"], (3, 0), value=1),
    }
    cross: Any = NormAttribution(model.get_base_model()).maps(inputs, stacks=["cross"]).cross
    method = NormAttribution(model)
    found = dict(word_maps(model, family.tokenizer, PAIRS, attention_maps(method)))
    for index, (source, target) in enumerate(zip(batch.source, batch.target, strict=True)):
        pair = batch.indices[index]
        for place, word in enumerate(sources[pair]):
            columns = [3 + piece for piece, of in enumerate(source.word_ids) if of == place]
            for row, _ in enumerate(targets[pair]):
                # AWI: the step that reads a piece is the one after it.
                steps = [step + 1 for step, of in enumerate(target.word_ids) if of == row]
                expected = cross[index][:, steps][..., columns].sum(-1).mean(-1)
                actual = torch.from_numpy(found[pair]["AWI"][:, row, place])
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=word)
    aligned = WordAligner(model, family.tokenizer, layer=0, recipe="paper").align(sources, targets)
    without = WordAligner(model.get_base_model(), family.tokenizer, layer=0, recipe="paper").align(sources, targets)
    assert aligned != without


def test_gradients_behind_a_tuned_prompt_are_refused(tmp_path: Path) -> None:
    family = made("Marian", tmp_path)
    model = tuned(family.model(), peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3))
    (batch,) = teacher_forced_batches(model, family.tokenizer, PAIRS)
    with pytest.raises(UnsupportedModelError, match=r"embeddings of its own.*use norms or weights$"):
        source_gradients(model, batch.inputs, batch.labels)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", ["Marian", "M2M100"])
def test_commands_take_adapters(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = made(name, tmp_path)
    family.model().save_pretrained(tmp_path / "base")
    family.plain.save_pretrained(tmp_path / "base")
    base = type(family.model()).from_pretrained(tmp_path / "base")
    adapted = lora(base)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = deepcopy(adapted).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    family.plain.save_pretrained(tmp_path / "merged")
    folder, source, target = (tmp_path / name for name in ("rwth", "source", "target"))
    folder.mkdir()
    files = {source: SOURCES, target: TARGETS, folder / "test.de": ["das Haus"], folder / "test.en": ["the house"]}
    for file, lines in {**files, folder / "alignment.talp": ["1-1 2-2"]}.items():
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for words in (
        ["extract", f"{source}", f"{target}", "--method=attention-block", "--setting=auto", "--layer=auto", "--scores"],
        ["translate", f"{source}", "--beam=2", "--max-length=8", "--alignments"],
        ["sweep", f"--corpus=rwth={folder}", "--bootstrap=0"],
    ):
        outputs = [
            printed(capsys, *words, f"--model={tmp_path / kind}", *family.options).replace(kind, "")
            for kind in ("adapter", "merged", "base")
        ]
        assert outputs[0] == outputs[1], words[0]
        if words[0] == "extract":  # translations of random models may all be empty
            assert outputs[0] != outputs[2]


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_quantised_weights(quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    family = made("Marian", tmp_path)
    config = family.model().config
    config.update({"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64})
    torch.manual_seed(0)
    whole: Any = hf.MarianMTModel(config)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    folder = tmp_path / "model"
    whole.save_pretrained(folder)
    family.plain.save_pretrained(folder)
    model: Any = load_model(str(folder), quantization)  # type: ignore[arg-type]

    def maps(of: Any) -> list[Tensor]:
        found = dict(word_maps(of, family.tokenizer, PAIRS, attention_maps(NormAttribution(without_head(of)))))
        return [torch.from_numpy(found[index]["AWI"]) for index in range(len(PAIRS))]

    found = maps(model)
    sources, targets = zip(*PAIRS, strict=True)
    links = WordAligner(model, family.tokenizer, layer=0, recipe="paper").align(sources, targets)
    file = tmp_path / "pairs"
    file.write_text("".join(f"{s} ||| {t}\n" for s, t in zip(SOURCES, TARGETS, strict=True)), encoding="utf-8")
    words = ["extract", str(file), f"--model={folder}", "--layer=0", "--recipe=paper"]
    assert printed(capsys, *words, f"--quantize={quantization}").splitlines() == list(map(format_pharaoh, links))
    # Eight bits round the inputs, too; four bits are multiplied in bfloat16 on some processors, where bitsandbytes
    # dequantises a model rightly only before it has run.
    fresh: Any = load_model(str(folder), quantization)  # type: ignore[arg-type]
    for pair, expected in zip(found, maps(fresh.dequantize()), strict=True):
        assert (pair - expected).norm() < 0.02 * expected.norm()
    for pair, expected in zip(found, maps(whole.eval()), strict=True):
        assert 1e-4 * expected.norm() < (pair - expected).norm()
