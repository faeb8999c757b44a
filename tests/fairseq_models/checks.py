"""What holds for models of real fairseq; run by ``python -m tests.fairseq_models``."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import captum_norm as cn
from alignment.fairseq import load_fairseq_checkpoint
from captum_norm.models import Scope
from tests.alignment.fairseq import make_reference
from tests.fairseq_models import live
from tests.families import state_of
from tests.padding import expect_alone
from tests.test_encoder_decoder import assert_near, expect_stack
from tests.test_matrix import interrupt

both_styles = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
SCOPES: dict[bool, list[Any]] = {False: ["attn", "attn_res", "attn_res_ln", "atb"], True: ["attn", "attn_res", "atb"]}
# Sources and targets of one padded length, so that nothing can be told by its shape.
LENGTHS = ((9, 4), (5, 9), (3, 1))


@both_styles
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_norms_of_all_stacks_equal_the_oracle(pre_norm: bool, seed: int, dtype: torch.dtype, tolerance: float) -> None:
    model, batch = live.build(pre_norm=pre_norm, learned=seed == 1, seed=seed, dtype=dtype), live.inputs(seed)
    scopes = SCOPES[pre_norm]
    measured: Any = cn.NormMeter(model).measure(batch, scopes=scopes, weights=True, per_head=True, head_norms=True)
    assert list(measured) == ["encoder", "decoder", "cross"]
    for stack, layers in live.oracle(model, batch).items():
        expect_stack(measured[stack], stack, layers, scopes, tolerance)


@both_styles
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_both_sequences_changes_nothing(pre_norm: bool, side: str) -> None:
    model, batch = live.build(pre_norm=pre_norm, learned=side == "left"), live.inputs(3, LENGTHS, side)
    method = cn.NormAttribution(model, "attn_res")
    maps: Any = method.maps(batch)
    assert torch.equal(maps.real, batch["src_tokens"] != live.PAD)
    assert torch.equal(maps.decoder_real, batch["prev_output_tokens"] != live.PAD)
    for row in range(len(LENGTHS)):
        source, target = maps.real[row], maps.decoder_real[row]
        ids = batch["src_tokens"][row : row + 1, source], batch["prev_output_tokens"][row : row + 1, target]
        alone = method.maps({"src_tokens": ids[0], "src_lengths": source.sum()[None], "prev_output_tokens": ids[1]})
        real = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
        expect_alone(maps, row, alone, real)


@both_styles
def test_the_model_computes_what_it_does_and_is_left_as_it_was(pre_norm: bool) -> None:
    model, batch = live.build(pre_norm=pre_norm), live.inputs(0, LENGTHS)
    for layer in model.encoder.layers:
        layer.can_use_fastpath = True  # as in 0.12.2, whose layers then run as one fused operation
    real = batch["prev_output_tokens"] != live.PAD
    with torch.no_grad():
        before, state = model(**batch)[0], state_of(model)
    seen: list[Tensor] = []

    def look(_: Any, __: Any, output: tuple[Tensor, Any]) -> None:
        if not any(layer.can_use_fastpath for layer in model.encoder.layers):
            seen.append(output[0])

    handle = model.register_forward_hook(look)
    method = cn.NormAttribution(model)
    method.maps(batch)
    method.maps(batch)
    handle.remove()
    for logits in seen[-2:]:
        torch.testing.assert_close(logits[real], before[real], rtol=0, atol=1e-6 * float(before.abs().max()))
    handle = model.decoder.layers[1].fc1.register_forward_pre_hook(interrupt)
    for failing in (method, cn.NormAttribution(model)):
        with pytest.raises(KeyboardInterrupt):
            failing.maps(batch)
    handle.remove()
    assert state_of(model) == state
    assert all(layer.can_use_fastpath for layer in model.encoder.layers)
    with torch.no_grad():
        assert torch.equal(model(**batch)[0], before)


@pytest.mark.parametrize("case", [make_reference.CASES[0], make_reference.CASES[-1]], ids=lambda case: case.name)
def test_the_same_checkpoint_read_without_fairseq_gives_the_same_maps(
    case: make_reference.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairseq import checkpoint_utils

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    make_reference.make(case, 0, tmp_path)
    [model], _ = checkpoint_utils.load_model_ensemble([str(tmp_path / f"{case.name}.pt")])
    loaded, _ = load_fairseq_checkpoint(tmp_path / f"{case.name}.pt", tmp_path / case.name, codes=False)
    source, target = make_reference.batch()
    lengths = source.ne(live.PAD).sum(1)
    # fairseq pads sources on the left.
    moved = torch.stack([row.roll(int(length)) for row, length in zip(source, lengths, strict=True)])
    batch = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
    same = {
        "input_ids": moved,
        "attention_mask": moved.ne(live.PAD).long(),
        "decoder_input_ids": target,
        "decoder_attention_mask": target.ne(live.PAD).long(),
    }
    maps: Any = cn.NormAttribution(model.float()).maps(batch, per_head=True)
    expected: Any = cn.NormAttribution(loaded).maps(same, per_head=True)
    assert_near(maps.decoder, expected.decoder.double(), 1e-5)
    for row, length in enumerate(lengths.tolist()):
        assert_near(maps.cross[row][..., -length:], expected.cross[row][..., :length].double(), 1e-5)
    # To the end of the layers, through the feed-forward networks.
    scope: Scope = "atb_ff_res" if case.pre_norm else "atb_ff_res_ln"
    found, same_found = (
        cn.NormMeter(subject).measure(inputs, scopes=[scope], stacks=["encoder", "cross"])
        for subject, inputs in ((model, batch), (loaded, same))
    )
    for row, length in enumerate(lengths.tolist()):
        encoder, cross = (found[stack].norms[scope][row] for stack in ("encoder", "cross"))
        encoder_of_same, cross_of_same = (same_found[stack].norms[scope][row] for stack in ("encoder", "cross"))
        assert_near(encoder[:, -length:, -length:], encoder_of_same[:, :length, :length].double(), 1e-5)
        assert_near(cross[..., -length:], cross_of_same[..., :length].double(), 1e-5)
    # And relevance, whose rules see other layers with other axes; fairseq's softmax is one of float32, in float64, too.
    monkeypatch.setattr("fairseq.utils.softmax", lambda scores, dim, onnx_trace: scores.softmax(dim))  # noqa: ARG005
    for kind in (cn.CPLRP, cn.AttnLRP, cn.GIM, cn.DecompX, partial(cn.DecompX, bias="absdot")):
        parts, same_parts = (
            kind(subject.double()).decompose(given, 7) for subject, given in ((model, batch), (loaded, same))
        )
        assert_near(parts.number, same_parts.number, 1e-11)
        assert_near(parts.scores.prefix, same_parts.scores.prefix, 1e-11)
        for row, length in enumerate(lengths.tolist()):
            assert_near(parts.scores.source[row, -length:], same_parts.scores.source[row, :length], 1e-11)


def test_an_encoder_alone_and_a_language_model() -> None:
    from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture

    model, batch = live.build(), live.inputs(0, LENGTHS, "left")
    whole, alone = cn.NormAttribution(model).maps(batch), cn.NormAttribution(model.encoder).maps(batch["src_tokens"])
    assert torch.equal(alone.encoder, whole.encoder)  # type: ignore[arg-type]
    assert alone.decoder is None
    arguments = Namespace(tokens_per_sample=20, decoder_embed_dim=16, decoder_attention_heads=2, decoder_layers=2)
    base_lm_architecture(arguments)
    language_model = TransformerLanguageModel.build_model(arguments, live.task()).eval()
    maps: Any = cn.NormAttribution(language_model).maps(batch["src_tokens"])
    assert maps.encoder is None
    assert torch.equal(maps.decoder[0] > 0, torch.ones(2, 9, 9).tril().bool())
    assert torch.equal(maps.real, batch["src_tokens"] != live.PAD)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_to_more_than_the_keys_is_refused(option: str) -> None:
    from fairseq.modules import MultiheadAttention

    model = live.build()
    model.encoder.layers[0].self_attn = MultiheadAttention(16, 4, self_attention=True, **{option: True}).eval()
    with pytest.raises(cn.UnsupportedModelError, match="attends from 9 to 10 positions"):
        cn.NormAttribution(model).maps(live.inputs())


def test_bad_input_is_said_in_one_sentence() -> None:
    model, batch = live.build(learned=True), live.inputs()
    method = cn.NormAttribution(model)
    source, target = batch["src_tokens"], batch["prev_output_tokens"]
    for changes, message in (
        ({"prev_output_tokens": target[:1]}, "got 2 examples for the encoder and 1 for the decoder"),
        ({"prev_output_tokens": target + 30}, r"token id .*; TransformerDecoder\w* knows the ids 0 to 39"),
        ({"src_tokens": source[0]}, r"got token ids of shape \(9,\)"),
        ({"src_tokens": source.repeat(1, 4)}, r"36 positions; TransformerEncoder\w* allows at most 30"),
        ({"src_tokens": torch.full_like(source, live.PAD)}, "the padding id leaves no position of example 0"),
        ({"incremental_state": {}}, "does not accept these inputs: .*incremental_state"),
    ):
        with pytest.raises(cn.InvalidInputError, match=message):
            method.maps(batch | changes)
    with pytest.raises(
        cn.InvalidInputError, match=r"prev_output_tokens.* \(pass src_tokens, src_lengths and prev_output"
    ):
        method.maps(source)
    assert method.maps((source, batch["src_lengths"], target)).cross is not None
