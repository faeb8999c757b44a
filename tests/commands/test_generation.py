"""``captum-norm explain`` with an answer; the same question has the same answer in Python and on the command line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import captum_norm as cn
from captum_norm import DecompX, GenerationAttribution, cli
from captum_norm.loading import LANGUAGE_MODEL, load
from tests import tiny
from tests.commands.calls import TEXT, refused, written
from tests.generation.servers import Said, completions
from tests.pages import content as content_of
from tests.tiny import classifier, gpt2, save_tiny, tokenizer

pytestmark = pytest.mark.usefixtures("wide_terminal")

PROMPT = """\
Eva lives in Prague with a golden guitar and a lawyer. It was a long time ago.
Clara found a tiny silver ring in the garden. Nobody knows why.
What did Clara find? Clara found"""


def explain(*words: str) -> int:
    return cli.main(["explain", *words])


@pytest.fixture
def prompt() -> str:
    Path("prompt.txt").write_text(PROMPT + "\n", encoding="utf-8")
    return "prompt.txt"


@pytest.fixture(scope="module")
def generation() -> GenerationAttribution:
    model, tokenizer = load(LANGUAGE_MODEL)
    return GenerationAttribution(DecompX(model), tokenizer)


def test_a_generated_answer_is_the_apis(
    prompt: str, generation: GenerationAttribution, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [Path(f"answer{suffix}") for suffix in (".json", ".csv", ".html", ".png")]
    files = [word for path in out for word in ("--out", str(path))]
    assert explain(prompt, "--generate", "20", "--method", "decompx", "--segments", "line", *files) == 0
    expected: Any = generation.attribute(PROMPT, segments="line", gen_args={"max_new_tokens": 20, "do_sample": False})
    content, printed = written(out[0]), capsys.readouterr().out
    assert content["answer"] == expected.explained.answer == " a tiny silver ring in the garden."
    assert content["scores"] == expected.seq_attr.tolist()
    assert content["token_scores"] == expected.token_attr.tolist()
    assert content["segment_scores"] == expected.segment_attr.tolist()
    assert out[1].read_bytes() == expected.file_bytes(".csv")
    assert all(path.stat().st_size > 0 for path in out)
    assert "answer:  a tiny silver ring in the garden." in printed
    assert printed.index("What did Clara find?") > 0


def test_a_context_is_a_text_or_a_file(
    prompt: str, generation: GenerationAttribution, capsys: pytest.CaptureFixture[str]
) -> None:
    passages, _, _ = PROMPT.rpartition("\n")
    Path("passages.txt").write_text(passages + "\n", encoding="utf-8")
    words = ("--method", "decompx", "--out", "answer.json")
    for context in ("passages.txt", passages.partition("\n")[2]):
        assert explain(prompt, "--generate", "20", "--context", context, *words) == 0
        given = passages if context == "passages.txt" else context
        expected: Any = generation.attribute(PROMPT, context=given)
        content, printed = written(Path("answer.json")), capsys.readouterr().out
        assert (content["context"], content["kl"]) == ([given], expected.kl.tolist())
        assert "depend on the context: “ tiny”, “ silver”, “ ring”, “ garden”" in printed
    assert "give either --generate N or --target TEXT" in refused(capsys, "explain", prompt, "--context", passages)
    components = ("--components", "heads", "--method", "relp")
    assert "got --context with --components" in refused(capsys, "explain", "A", *components, "--context", "A")


def test_a_given_answer_and_its_rival(prompt: str, generation: GenerationAttribution) -> None:
    out, words = Path("answer.json"), [" a tiny silver ring", " a tiny golden guitar"]
    method = ["--method", "decompx", "--out", str(out)]
    assert explain(prompt, "--target", words[0], "--contrast", words[1], *method) == 0
    expected = generation.attribute(PROMPT, words[0], contrast=words[1])
    assert written(out)["scores"] == expected.seq_attr.tolist()
    assert written(out)["contrast"] == " golden"


@pytest.mark.few
@pytest.mark.parametrize("method", ["random", "saliency", "information-flow", "weights"])
def test_other_methods(method: str) -> None:
    out = Path("answer.json")
    assert (
        explain("Clara found", "--target", " a tiny", "--model", LANGUAGE_MODEL, "--method", method, "--out", str(out))
        == 0
    )
    content = written(out)
    assert content["method"] == method
    assert any(score > 0 for score in content["scores"])


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_tiny(tiny.t5(), tmp_path_factory.mktemp("t5")))


def test_a_page_of_information_flow_has_the_routes_through_both_stacks(t5: str) -> None:
    out = Path("flow.html")
    words = ["--target", "the dog", "--method", "information-flow", "--model", t5, "--out", str(out)]
    assert explain("a cat runs", *words) == 0
    (example,) = content_of(out.read_text(encoding="utf-8"))["examples"]
    nodes = example["graph"]["nodes"]
    source = example["inputs"]["texts"].index("[PAD]")  # the decoder begins
    assert {stack for stack, *_, position in nodes if position < source} == {"encoder"}
    assert {stack for stack, *_, position in nodes if position >= source} == {"decoder"}
    ends = [nodes[node] for _, node in example["graph"]["outputs"]]
    assert [position for *_, position in ends] == list(range(source, len(example["inputs"]["texts"])))
    assert len(example["outputs"]["texts"]) == len(ends)


@pytest.mark.parametrize("words", [[], ["--method", "information-flow"]])
def test_encoder_decoders_explain_answers(t5: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--generate N or --target TEXT" in refused(capsys, "explain", "a cat runs", "--model", t5, *words)


def test_words_are_segments(prompt: str, generation: GenerationAttribution, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("answer.json")
    given = ["--target", " a tiny", "--method", "decompx", "--segments", "word", "--top", "2", "--out", str(out)]
    assert explain(prompt, *given) == 0
    expected: Any = generation.attribute(PROMPT, " a tiny", segments="word")
    content = written(out)
    assert content["segments"] == list(expected.segments or ())
    assert content["segments"][:5] == ["Eva", "lives", "in", "Prague", "with"]
    assert content["method"] == "decompx"
    assert sum(content["segment_scores"]) == pytest.approx(float(expected.segment_attr.sum()))
    printed = capsys.readouterr().out
    rows = printed[printed.index("index") :].splitlines()[1:]
    assert [row.split()[1] for row in rows[:2]] == [name for name, _ in expected.top(2)]
    assert rows[2].startswith("wrote")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--generate", "3", "--words"], "--words"),
        (["another", "--generate", "3"], "several texts"),
        (["--generate", "3", "--dtype", "float64", "--quantize", "int8"], "decides the dtype"),
        (["--generate", "3", "--target", "a"], "either --generate N or --target TEXT"),
        (["--segments", "line"], "either --generate N or --target TEXT"),
        (["--generate", "0"], "expected a number from 1"),
        (["--generate", "3", "--layer", "1"], "--layer"),
        (["--generate", "3", "--contrast", " b"], "explains no logit"),
        (["--generate", "3", "--chat", "missing.json"], "got a text and --chat"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    prompt: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "explain", prompt, *words)


def test_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Path("chat.json")
    for content, message in (
        ('[{"role": "user", "content": "Anna owns"}]', "has no chat template"),
        ("{", "is not JSON"),
    ):
        chat.write_text(content, encoding="utf-8")
        assert message in refused(capsys, "explain", "--chat", str(chat), "--generate", "3")
    assert "got no prompt" in refused(capsys, "explain", "--generate", "3")
    assert "missing.json" in refused(capsys, "explain", "--chat", "missing.json", "--generate", "3")


def answered(model: Any, tokenizer: Any) -> Said:
    ids, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (PROMPT, " a tiny silver ring"))
    return Said(model, tokenizer, [tokenizer.bos_token_id, *ids], answer, tokenizer.eos_token_id, text=PROMPT)


def test_what_a_server_answered(generation: GenerationAttribution, capsys: pytest.CaptureFixture[str]) -> None:
    record = completions(answered(generation.model, generation.tokenizer))
    file, out = Path("said.json"), Path("out.json")
    file.write_text(json.dumps(record), encoding="utf-8")
    given = ["--response", str(file), "--method", "decompx", "--segments", "line", "--out", str(out), "--out", "a.html"]
    assert explain(*given) == 0
    expected: Any = generation.attribute(PROMPT, " a tiny silver ring", segments="line")
    content, printed = written(out), " ".join(capsys.readouterr().out.split())
    assert content["scores"] == expected.seq_attr.tolist()
    assert content["segment_scores"] == expected.segment_attr.tolist()
    assert content["note"].startswith("Log-probabilities of the server and of the model differ by ")
    assert content["note"] in printed
    assert content["note"] in Path("a.html").read_text(encoding="utf-8")

    for row in record["response"]["choices"]:
        row["logprobs"]["token_logprobs"] = [-3.0] * 5
    file.write_text(json.dumps(record), encoding="utf-8")
    message = refused(capsys, "explain", *given)
    assert re.search(r"server and of .* differ by 3 nats on average, by 3 at most; expected 0.5", message)
    assert explain(*given, "--max-gap", "4") == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"request": {"prompt": "Clara', "said.json is not JSON"),
        ("[" * 100_000, "said.json is not JSON"),
        ('{"response": NaN}', "got the response nan; expected an object"),
        ("[]", "got choice 0 of a response that has 0"),
        ('{"response": {"choices": [{"text": " a"}]}}', "without its prompt"),
        (json.dumps({"request": {"prompt": "Clara " * 600}, "response": {"choices": [{"text": " a"}]}}), "at most 513"),
    ],
)
def test_responses_that_are_refused(content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("said.json").write_text(content, encoding="utf-8")
    assert message in refused(capsys, "explain", "--response", "said.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Clara", "--response", "said.json"], "got a prompt and --response"),
        (["--chat", "chat.json", "--response", "said.json"], "got a prompt and --response"),
        (["--generate", "3", "--response", "said.json"], "give either --generate N"),
        (["--response", "said.json"], "cannot read said.json"),
        (["--response", "said.json", "--max-gap", "x"], "invalid float value"),
        (["--response", "said.json", "--choice", "-1"], "expected a number from 0"),
    ],
)
def test_options_that_do_not_fit_a_response(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "explain", *words)


SUFFIXES = (".html", ".csv", ".json", ".png")


def files_of(*words: str) -> dict[str, bytes]:
    """What the command writes."""
    outs = [word for suffix in SUFFIXES for word in ("--out", f"answer{suffix}")]
    assert cn.cli.main(["explain", *words, *outs]) == 0
    return {suffix: Path(f"answer{suffix}").read_bytes() for suffix in SUFFIXES}


@pytest.mark.parametrize("make", [classifier, gpt2])
@pytest.mark.parametrize(("method", "target"), [("norm", None), ("decompx", None), ("decompx", "1"), ("weights", None)])
def test_a_text(make: Any, method: str, target: str | None) -> None:
    model = make()
    folder = str(save_tiny(model, Path("model")))
    given = () if target is None else ("--target", target)
    written = files_of(TEXT, "--model", folder, "--method", method, *given)
    for subject in ((folder,), (model, tokenizer())):
        found = cn.explain(TEXT, *subject, method=method, target=target, name=folder)
        for suffix, content in written.items():
            assert content == found.file_bytes(suffix), suffix
    assert found.outputs[0].explained == (method == "decompx")
    assert found.aggregation == {"decompx": "propagated", "weights": "mean"}.get(
        method, "rollout" if make is classifier else "mean"
    )
    assert {maps.method for maps in found.page().examples[0].maps} >= {"weights"}


@pytest.mark.parametrize("method", [cn.NormAttribution, cn.ALTI, cn.DecompX])
@pytest.mark.parametrize(
    ("subject", "prompt", "target"),
    [
        (LANGUAGE_MODEL, "Clara found", None),
        (LANGUAGE_MODEL, "Clara found", " a tiny"),
        ("t5", "a cat runs", "the dog"),
    ],
)
def test_an_answer(subject: str, prompt: str, target: str | None, method: Any) -> None:
    if subject == "t5":
        save_tiny(tiny.t5(), Path(subject))
    given = ("--generate", "3") if target is None else ("--target", target)
    written = files_of(prompt, "--model", subject, "--method", method.name, *given)
    arguments = {"max_new_tokens": 3, "do_sample": False} if target is None else None
    model, words = load(subject)
    found = cn.GenerationAttribution(method(model), words).attribute(prompt, target, gen_args=arguments)
    found.explained = replace(found.explained, model=subject)
    for suffix, content in written.items():
        assert content == found.file_bytes(suffix), suffix
