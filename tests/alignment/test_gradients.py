"""Gradient baselines against one backward pass for each target word of each sentence alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from alignment.gradients import GradientKind, source_gradients
from captum_norm import InvalidInputError, UnsupportedModelError
from tests.encoder_decoders import BART, VOCABULARY, build
from tests.families import state_of
from tests.versions import older

PAD = 1
LENGTHS = ((4, 19), (9, 5), (6, 9))
KINDS: tuple[GradientKind, ...] = ("saliency", "gradient_x_input")


def batch(seed: int = 0, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> tuple[dict[str, Tensor], Tensor]:
    """Random pairs of these source and target lengths, padded: inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    width, height = (max(sizes) for sizes in zip(*lengths, strict=True))
    sources = torch.full((len(lengths), width), PAD)
    read, labels = torch.full((len(lengths), height), PAD), torch.full((len(lengths), height), -100)
    for row, (source, target) in enumerate(lengths):
        # Distinct pieces, so that the rows of an embedding table can stand for positions.
        sources[row, :source] = torch.randperm(VOCABULARY - 3, generator=generator)[:source] + 3
        pieces = torch.randint(3, VOCABULARY, (target,), generator=generator)
        labels[row, :target] = pieces
        read[row, :target] = torch.cat([torch.tensor([2]), pieces[:-1]])
    mask = (sources != PAD).long()
    return {"input_ids": sources, "attention_mask": mask, "decoder_input_ids": read}, labels


def word_by_word(
    model: Any, inputs: dict[str, Tensor], labels: Tensor, scale: float = 1.0
) -> dict[GradientKind, Tensor]:
    """Both kinds, (B, T, S): each sentence without padding, each target word after what comes before it alone."""
    found = {kind: torch.zeros(*labels.shape, inputs["input_ids"].shape[1], dtype=torch.float64) for kind in KINDS}
    for row, ids in enumerate(inputs["input_ids"]):
        real = ids[ids != PAD]
        embedded = model.get_encoder().get_input_embeddings()(real).detach()
        for step in range(int((labels[row] != -100).sum())):
            leaf = embedded.clone().requires_grad_()
            read = inputs["decoder_input_ids"][row : row + 1, : step + 1]
            logits = model(inputs_embeds=scale * leaf[None], decoder_input_ids=read, use_cache=False).logits
            (gradient,) = torch.autograd.grad(logits[0, -1].log_softmax(-1)[labels[row, step]], leaf)
            found["saliency"][row, step, : len(real)] = gradient.pow(2).sum(-1).sqrt()
            found["gradient_x_input"][row, step, : len(real)] = torch.einsum("sd,sd->s", gradient, embedded)
    return found


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.few
@pytest.mark.parametrize("name", ["marian", "bart", "mbart", "m2m100", "pegasus", "t5", "mt5"])
def test_equals_one_backward_pass_for_each_word(name: str) -> None:
    model = build(name, dtype=torch.float64)
    inputs, labels = batch()
    expected = word_by_word(model, inputs, labels)
    model.train()
    for kind in KINDS:
        for group_size in (2, 16):
            found = source_gradients(model, inputs, labels, kind=kind, group_size=group_size)
            # Before transformers 5.15, T5's softmax was in float32.
            close(found, expected[kind], 1e-6 if name.endswith("t5") and older("5.15") else 1e-11)
    assert (expected["gradient_x_input"] < 0).any()


def test_embeddings_are_those_before_the_scaling_outside_their_module() -> None:
    torch.manual_seed(0)
    model = hf.MarianMTModel(hf.MarianConfig(**BART, scale_embedding=True)).double().eval()  # type: ignore[no-untyped-call]
    inputs, labels = batch(1, ((3, 4), (5, 2)))
    expected = word_by_word(model, inputs, labels, scale=BART["d_model"] ** 0.5)
    for kind in KINDS:
        close(source_gradients(model, inputs, labels, kind=kind), expected[kind])


def test_module_shared_by_both_sides_counts_in_the_encoder_alone() -> None:
    model = build("t5", dtype=torch.float64)
    inputs, labels = batch(2)
    expected = source_gradients(model, inputs, labels)
    model.decoder.embed_tokens = model.encoder.embed_tokens
    close(source_gradients(model, inputs, labels), expected)


def fsmt() -> Any:
    torch.manual_seed(0)
    sizes = {name: size for name, size in BART.items() if name not in ("vocab_size", "pad_token_id")}
    config = hf.FSMTConfig(src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY, pad_token_id=PAD, **sizes)
    model = hf.FSMTForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()  # type: ignore[no-untyped-call]


def test_decoder_that_makes_the_logits_itself() -> None:
    model = fsmt()
    inputs, labels = batch(3, ((4, 5), (6, 3)))
    table = model.get_encoder().embed_tokens.weight
    expected = torch.zeros(2, 5, 6)
    for row, step in zip(*(labels != -100).nonzero(as_tuple=True), strict=True):
        log_p = model(**inputs, use_cache=False).logits[row, step].log_softmax(-1)[labels[row, step]]
        (gradient,) = torch.autograd.grad(log_p, table)
        ids = inputs["input_ids"][row]
        expected[row, step] = (gradient * table)[ids].sum(-1).detach() * (ids != PAD)
    more = {"decoder_attention_mask": (labels != -100).long(), "use_cache": False}
    # FSMT has no double precision.
    close(source_gradients(model, inputs | more, labels, kind="gradient_x_input"), expected, 1e-5)


def test_step_without_a_label_is_zero_and_changes_no_other() -> None:
    model = build("pegasus", dtype=torch.float64)
    inputs, labels = batch(5)
    expected = source_gradients(model, inputs, labels)
    expected[0, 0] = expected[2, 4] = expected[1] = 0
    labels[0, 0] = labels[2, 4] = labels[1] = -100
    close(source_gradients(model, inputs, labels), expected)


def test_padded_and_unlabelled_places_are_exactly_zero() -> None:
    inputs, labels = batch(6)
    for kind in KINDS:
        found = source_gradients(build("bart"), inputs, labels, kind=kind)
        real = (labels != -100)[:, :, None] & (inputs["attention_mask"] == 1)[:, None]
        assert torch.equal(found != 0, real)


def test_maps_of_a_half_precision_model_are_in_single_precision() -> None:
    found = source_gradients(build("marian", dtype=torch.bfloat16), *batch(7))
    assert found.dtype == torch.float32
    assert found.isfinite().all()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_works_whatever_the_gradient_mode(context: Callable[[], Any]) -> None:
    model = build("m2m100", dtype=torch.float64)
    inputs, labels = batch(8)
    expected = source_gradients(model.requires_grad_(False), inputs, labels)
    model.requires_grad_(True)
    with context():
        found = source_gradients(model, {name: ids.clone() for name, ids in inputs.items()}, labels.clone())
        assert torch.is_grad_enabled() == (context is torch.enable_grad)
    assert not found.requires_grad
    assert not found.is_inference()
    close(found, expected)


@pytest.mark.parametrize("fails", [None, "forward pass", "label"])
def test_model_is_left_as_it_was(fails: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bart")
    model.train()
    model.model.decoder.layers[0].eval()
    model.model.encoder.layers[0].requires_grad_(False)
    model.get_encoder().get_input_embeddings().register_forward_hook(lambda *_: None)
    inputs, labels = batch(9)
    before = state_of(model)
    if fails is None:
        source_gradients(model, inputs, labels)
    elif fails == "label":
        labels[0, 0] = VOCABULARY
        with pytest.raises(InvalidInputError):
            source_gradients(model, inputs, labels)
    else:
        with monkeypatch.context() as patch:
            patch.setitem(vars(model.lm_head), "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                source_gradients(model, inputs, labels)
    assert state_of(model) == before


class HeadElsewhere(hf.BartForConditionalGeneration):  # type: ignore[no-untyped-call]
    """Its logits do not come from what its decoder returns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = torch.ones_like(output.logits, requires_grad=True).cumsum(-1)
        return output


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (torch.nn.Linear(2, 2), "got a Linear, expected an encoder–decoder"),
        (hf.BertModel(hf.BertConfig(hidden_size=12, num_hidden_layers=1)), "got a BertModel, expected an encoder"),
        (hf.BartModel(hf.BartConfig(**BART)), "got a BartModel, expected a model with a language-modelling head"),
        (HeadElsewhere(hf.BartConfig(**BART)), "HeadElsewhere does not compute its logits from its decoder's output"),
    ],
    ids=["no transformer", "encoder", "no head", "other head"],
)
def test_other_models_are_refused(model: Any, expected: str) -> None:
    with pytest.raises(UnsupportedModelError, match=expected):
        source_gradients(model, *batch())


IDS, MASK, READ = torch.full((2, 3), 4), torch.ones(2, 3), torch.full((2, 5), 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "norm"}, "got kind='norm' and group_size=16, expected one of saliency, gradient_x_input"),
        ({"group_size": 0}, "group_size=0, .* at least 1"),
        ({"attention_mask": None}, "got inputs named decoder_input_ids, input_ids, expected attention_mask, decoder_i"),
        ({"decoder_inputs_embeds": torch.ones(2, 5, 32)}, "got inputs named attention_mask, decoder_input_ids, decode"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask \(2, 4\), .* expected \(B, S\)"),
        ({"labels": torch.full((2, 4), 3)}, r"decoder_input_ids \(2, 5\), labels \(2, 4\), expected"),
        ({"labels": torch.full((2, 5, 1), 3), "decoder_input_ids": READ[..., None]}, r"labels \(2, 5, 1\), expected"),
        ({"labels": torch.ones(1, 5).long(), "decoder_input_ids": READ[:1]}, r"labels \(1, 5\), expected"),
        ({"input_ids": IDS[:, :0], "attention_mask": MASK[:, :0]}, r"input_ids \(2, 0\), .* none empty"),
        ({"attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}, "got an attention_mask that hides all of sentence "),
        (
            {"labels": torch.full((2, 5), VOCABULARY)},
            f"got the label {VOCABULARY}, expected -100 or one of the model's",
        ),
        ({"labels": torch.full((2, 5), -1)}, "got the label -1, expected -100 or one of the model's 40 pieces"),
    ],
)
def test_refuses(changes: dict[str, Any], expected: str) -> None:
    given = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": READ, "labels": READ} | changes
    options = {name: given.pop(name) for name in ("kind", "group_size") if name in given}
    labels = given.pop("labels")
    inputs = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(InvalidInputError, match=expected):
        source_gradients(build("bart"), inputs, labels, **options)
