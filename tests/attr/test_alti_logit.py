"""ALTI-Logit and direct logit attribution against sums written out by hand, in float64; batches, caches, refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import ALTILogit, Difference, InvalidInputError
from captum_norm.attr.logit_updates import stacked_heads
from captum_norm.errors import UnsupportedScopeError
from captum_norm.results.maps import SourceAndPrefix
from tests import encoder_decoders, families, feed_forwards, oracle
from tests.attr.test_alti import cross_shares, shares
from tests.classifiers import classifier, sentences
from tests.families import FAMILIES, tiers

# Where the last norm is.
HEADS = {
    "gpt2": "transformer.ln_f",
    "llama": "model.norm",
    "gptj": "transformer.ln_f",
    "gpt-neox": "gpt_neox.final_layer_norm",
    "opt": "model.decoder.final_layer_norm",
    "granite": "model.norm",
}


def outputs_of(model: Any, name: str, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The streams behind each layer, (B, S, D), and the logits."""
    names = [FAMILIES[name].layer.format(index) for index in range(model.config.num_hidden_layers)]
    with torch.no_grad(), oracle.watched(model, {layer: (layer, "first") for layer in names}) as seen:
        logits = model(ids).logits
    return [stream for (stream,) in seen.values()], logits


def by_hand(name: str, model: Any, ids: Tensor, example: int, position: int, token: int) -> SimpleNamespace:
    """One example's decomposition of the logit of ``token`` at ``position``."""
    family = FAMILIES[name]
    layers = oracle.layers(family, model, ids)
    streams, logits = outputs_of(model, name, ids)
    norm, head = model.get_submodule(HEADS[name]), model.get_output_embeddings()
    last = streams[-1][example, position]
    gain, beta = norm.weight.detach(), getattr(norm, "bias", None)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    mean = last.mean() if family.centered else torch.zeros(())
    sigma = (((last - mean) ** 2).mean() + eps).sqrt()
    scaling = getattr(model.config, "logits_scaling", 1.0)
    direction = gain * head.weight[token].detach() / sigma / scaling
    if family.centered:
        direction = direction - direction.mean()
    bias = torch.zeros(()).double()
    if beta is not None:
        bias = bias + beta.detach() @ head.weight[token].detach() / scaling
    if head.bias is not None:
        bias = bias + head.bias[token].detach() / scaling
    rollout = torch.eye(ids.shape[1]).double()
    scores = torch.zeros(ids.shape[1]).double()
    embedding = layers[0].residual[example, position] @ direction
    scores[position] += embedding
    heads, keys, written = [], [], []
    for layer, after in zip(layers, streams, strict=True):
        vectors = oracle.vectors_per_head(layer.weights, layer.values, layer.projection)[example, :, position]
        updates = (vectors * layer.factor) @ direction
        heads.append(updates.sum(1))
        keys.append(updates)
        bias = bias + (layer.bias * layer.factor) @ direction
        scores = scores + updates.sum(0) @ rollout
        total = layer.residual[example, position] + layer.factor * (vectors.sum((0, 1)) + layer.bias)
        update = (after[example, position] - total) @ direction
        written.append(update)
        before, rollout = rollout, shares(*layer.vectors("atb"))[example] @ rollout
        scores = scores + update * (before if family.style == "parallel" else rollout)[position]
    parts = {"embedding": embedding, "heads": torch.stack(heads), "feed_forward": torch.stack(written)}
    parts["keys"] = torch.stack(keys)
    return SimpleNamespace(**parts, bias=bias, logit=logits[example, position, token], scores=scores)


@pytest.mark.few
@pytest.mark.parametrize(("seed", "name"), [*enumerate(HEADS), (7, "gpt2"), (8, "llama"), (9, "gptj")])
def test_updates_and_scores_equal_the_sums_by_hand(seed: int, name: str) -> None:
    model, ids = families.build(name, seed, torch.float64), families.inputs(name, seed)
    tolerance = 1e-6 if FAMILIES[name].single else 1e-10
    method, places, tokens = ALTILogit(model), [[4, 2], [1, 5], [5, 3]], [[7, 9], [3, 11], [20, 8]]
    parts = method.decompose(ids, tokens, position=places)
    updates = method.logit_updates(ids, tokens, position=places)
    numbers = torch.tensor([[0, 2, 0, -1, 2, 1, *[0] * 9], [1, -1, 2, 2, 0, 1, *[2] * 9], [0, 1, 2, 2, 2, 2, *[1] * 9]])
    groups = numbers[:, : ids.shape[1]]
    grouped = method.head_updates(ids, tokens, position=places, segments=groups)
    for example, (row, column) in enumerate(zip(places, tokens, strict=True)):
        for p, (position, token) in enumerate(zip(row, column, strict=True)):
            expected = by_hand(name, model, ids, example, position, token)
            for found, by_definition in (
                (updates.embedding, expected.embedding),
                (updates.heads, expected.heads),
                (updates.feed_forward, expected.feed_forward),
                (updates.bias, expected.bias),
                (updates.number, expected.logit),
                (parts.number, expected.logit),
                (parts.bias, expected.bias),
                (parts.scores, expected.scores),
            ):
                assert (found[example, p] - by_definition).abs().max() < tolerance
            for group in range(3):
                of_group = expected.keys[..., groups[example] == group].sum(-1)
                assert (grouped[example, p, ..., group] - of_group).abs().max() < tolerance
    whole = updates.embedding + updates.heads.sum((-2, -1)) + updates.feed_forward.sum(-1) + updates.bias
    for total, number in ((whole, updates.number), (parts.scores.sum(-1) + parts.bias, parts.number)):
        assert ((total - number).abs() < (1e-6 if FAMILIES[name].single else 1e-9)).all()
    assert updates.cross_heads is None
    for p in range(2):
        row, column = [place[p] for place in places], [token[p] for token in tokens]
        torch.testing.assert_close(method.attribute(ids, column, position=row), parts.scores[:, p])
        torch.testing.assert_close(method.decompose(ids, column, position=row).bias, parts.bias[:, p])
    other = method.decompose(ids, Difference(torch.tensor(tokens), 4), position=places)
    against = method.decompose(ids, 4, position=places)
    torch.testing.assert_close(other.scores, parts.scores - against.scores)
    torch.testing.assert_close(other.number, parts.number - against.number)


def head_of_means(output: Any, real: Tensor) -> Tensor:
    """Five numbers that read the mean of the real positions."""
    hidden = output if isinstance(output, Tensor) else output[0]
    if hidden.shape[:2] != real.shape:
        return hidden.mean(1)[:, :5]
    real = real[..., None].to(hidden)
    return (hidden * real).sum(1)[:, :5] / real.sum(1)


@pytest.mark.parametrize("name", tiers(name for name in FAMILIES if name not in feed_forwards.NOT_UNDERSTOOD))
def test_the_parts_of_every_family_add_up(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = families.build(name, 1, torch.float64), families.inputs(name, 1, dtype=torch.float64)
    with torch.no_grad():
        output = model(inputs)
    has_logits = "logits" in output and output["logits"].dim() == 3
    readout = None if has_logits else head_of_means
    where: Any = {"position": 2} if has_logits else {}
    method = ALTILogit(model, readout=readout)
    parts, updates = method.decompose(inputs, 3, **where), method.logit_updates(inputs, 3, **where)
    tolerance = 1e-6 if family.single else 1e-9
    if has_logits:
        assert (parts.number - output["logits"][:, 2, 3]).abs().max() < tolerance
    assert (parts.scores.sum(1) + parts.bias - parts.number).abs().max() < tolerance
    whole = updates.embedding + updates.heads.sum((1, 2)) + updates.feed_forward.sum(1) + updates.bias
    assert (whole - parts.number).abs().max() < tolerance
    assert parts.convergence_delta.max() < tolerance
    # Every part does something: none is the remainder of the others.
    for part in (updates.embedding, updates.heads, updates.feed_forward):
        assert part.abs().amin() > 0
    maps = method.maps(inputs, target=3, **where)
    torch.testing.assert_close(maps.self_attention.sum((1, 2)), parts.scores)
    torch.testing.assert_close(method.scores(maps), parts.scores)
    one = method.attribute(inputs, 3, layer=1, **where)
    torch.testing.assert_close(one, maps.self_attention[:, 1].sum(1))


def unnormalized(norm: Any, whole: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """A direction behind a LayerNorm of ``whole``, (D,), before it by autograd; and what β adds."""
    deviation = whole - whole.mean()
    sigma = ((deviation**2).mean() + norm.eps).sqrt()
    part = whole.clone().requires_grad_()
    with torch.enable_grad():
        normed = norm.weight.detach() * (part - part.mean()) / sigma
        (before,) = torch.autograd.grad(normed @ direction, part)
    return before, norm.bias.detach() @ direction


@pytest.mark.parametrize("seed", range(2))
def test_a_post_norm_models_updates_pass_all_norms_behind_them(seed: int) -> None:
    model, ids = families.build("openai-gpt", seed, torch.float64), families.inputs("openai-gpt", seed)
    layers, example, position, token = oracle.layers(FAMILIES["openai-gpt"], model, ids), 1, 3, 5
    streams, logits = outputs_of(model, "openai-gpt", ids)
    direction, bias = model.get_output_embeddings().weight[token].detach(), torch.zeros(()).double()
    tokens, feed_forward, heads = torch.zeros(ids.shape[1]).double(), list[Tensor](), list[Tensor]()
    rollouts = [torch.eye(ids.shape[1]).double()]
    for layer in layers:
        rollouts.append(shares(*layer.vectors("atb"))[example] @ rollouts[-1])
    for index in (1, 0):
        layer, block = layers[index], model.get_submodule(f"transformer.h.{index}")
        vectors = oracle.vectors_per_head(layer.weights, layer.values, layer.projection)[example, :, position]
        summed = layer.residual[example, position] + vectors.sum((0, 1)) + layer.bias
        middle = block.ln_1(summed).detach()
        written = block.mlp(middle).detach()
        torch.testing.assert_close(block.ln_2(middle + written).detach(), streams[index][example, position])
        direction, added = unnormalized(block.ln_2, middle + written, direction)
        bias = bias + added
        feed_forward.insert(0, written @ direction)
        tokens = tokens + feed_forward[0] * rollouts[index + 1][position]
        direction, added = unnormalized(block.ln_1, summed, direction)
        bias = bias + added + layer.bias @ direction
        updates = vectors @ direction
        heads.insert(0, updates.sum(1))
        tokens = tokens + updates.sum(0) @ rollouts[index]
    embedding = layers[0].residual[example, position] @ direction
    tokens[position] += embedding
    method = ALTILogit(model)
    found, parts = method.logit_updates(ids, token, position=position), method.decompose(ids, token, position=position)
    for actual, expected in (
        (found.embedding, embedding),
        (found.heads, torch.stack(heads)),
        (found.feed_forward, torch.stack(feed_forward)),
        (found.bias, bias),
        (parts.scores, tokens),
        (found.number, logits[example, position, token]),
    ):
        assert (actual[example] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("seed", range(2))
def test_an_encoder_decoders_scores_equal_the_sums_by_hand(seed: int) -> None:
    model, inputs = encoder_decoders.build("mbart", seed, torch.float64), encoder_decoders.inputs("mbart", seed)
    layers, target, token = encoder_decoders.oracle("mbart", model, inputs), 4, 9
    decoder = model.model.decoder
    places = {index: (f"model.decoder.layers.{index}", "first") for index in range(len(decoder.layers))}
    with torch.no_grad(), oracle.watched(model, places) as seen:
        logits = model(**inputs).logits
    ends = [end for (end,) in seen.values()]
    for example in range(2):
        read = model.lm_head.weight[token].detach()
        g, bias = unnormalized(decoder.layer_norm, ends[-1][example, target], read)
        bias = bias + model.final_logits_bias[0, token]
        source_positions = torch.eye(inputs["input_ids"].shape[1]).double()
        for layer in layers["encoder"]:
            source_positions = shares(*layer.vectors("atb"))[example] @ source_positions
        sources, targets = len(source_positions), inputs["decoder_input_ids"].shape[1]
        state = torch.cat([torch.zeros(targets, sources), torch.eye(targets)], 1).double()
        scores = layers["decoder"][0].residual[example, target] @ g * state[target]
        for own, cross, end in zip(layers["decoder"], layers["cross"], ends, strict=True):
            vectors = oracle.vectors_per_head(own.weights, own.values, own.projection)[example, :, target]
            scores = scores + vectors.sum(0) @ g @ state
            state = shares(*own.vectors("atb"))[example] @ state
            across = oracle.vectors_per_head(cross.weights, cross.values, cross.projection)[example, :, target]
            read_source = torch.cat([source_positions, torch.zeros(sources, targets)], 1)
            scores = scores + across.sum(0) @ g @ read_source
            c = cross_shares(cross)[example]
            state = c @ read_source + (1 - c.sum(1))[:, None] * state
            bias = bias + (own.bias + cross.bias) @ g
            written = end[example, target] - cross.residual[example, target] - across.sum((0, 1)) - cross.bias
            scores = scores + written @ g * state[target]
        parts = ALTILogit(model).decompose(inputs, token, position=target)
        assert isinstance(parts.scores, SourceAndPrefix)
        assert (parts.scores.source[example] - scores[:sources]).abs().max() < 1e-10
        assert (parts.scores.prefix[example] - scores[sources:]).abs().max() < 1e-10
        assert (parts.bias[example] - bias).abs() < 1e-10
        assert (scores.sum() + bias - logits[example, target, token]).abs() < 1e-9
    method = ALTILogit(model)
    several = method.decompose(inputs, [[token, 3], [token, 5]], position=[[target, 0], [target, 5]])
    torch.testing.assert_close(several.scores.source[:, 0], parts.scores.source)
    updates: Any = method.logit_updates(inputs, token, position=target)
    whole = (
        updates.embedding + updates.heads.sum((1, 2)) + updates.cross_heads.sum((1, 2)) + updates.feed_forward.sum(1)
    )
    assert (whole + updates.bias - updates.number).abs().max() < 1e-9
    halves = torch.arange(inputs["input_ids"].shape[1]).expand(len(inputs["input_ids"]), -1) % 2
    grouped = method.head_updates(inputs, token, position=target, segments=halves)
    torch.testing.assert_close(grouped.sum(-1), updates.cross_heads)
    maps: Any = method.maps(inputs, target=token, position=target)
    torch.testing.assert_close(maps.cross.sum((1, 2)), parts.scores.source)
    torch.testing.assert_close(maps.decoder.sum((1, 2)), parts.scores.prefix)
    with pytest.raises(InvalidInputError, match="the encoder adds nothing to the output directly"):
        method.maps(inputs, target=token, stacks=["encoder"])


def test_several_values_of_a_padded_batch() -> None:
    ids, mask = sentences([9, 6, 7, 4])
    method, target = ALTILogit(families.build("gpt2", dtype=torch.float64)), torch.tensor([0, 2, 1, 2])
    together = method.decompose({"input_ids": ids, "attention_mask": mask}, target)
    last = [[int(row.nonzero().max()), int(row.nonzero().min()) + 1] for row in mask]
    several = method.decompose(ids, [[t, 7] for t in target.tolist()], mask, position=last)
    torch.testing.assert_close(several.scores[:, 0], together.scores)
    torch.testing.assert_close(several.bias[:, 0], together.bias)
    torch.testing.assert_close(several.number[:, 0], together.number)


def test_repeated_positions_have_a_target_each_and_none_is_the_prediction() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=1)
    method = ALTILogit(model)
    found = method.decompose(ids, [[7, 9, 9, 4]], position=[[3, 3, 2, 3]])
    for p, (token, position) in enumerate([(7, 3), (9, 3), (9, 2), (4, 3)]):
        alone = method.decompose(ids, token, position=position)
        for several, one in zip(found[:4], alone[:4], strict=True):
            torch.testing.assert_close(several[:, p], one, rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        predicted = model(ids).logits[0, [1, 4]]
    each = method.decompose(ids, [[7, 9]], position=3)
    torch.testing.assert_close(each.scores, found.scores[:, :2])
    torch.testing.assert_close(each.bias, found.bias[:, :2])
    whole = method.decompose(ids, [[7, 9]], position=3, together=True)
    torch.testing.assert_close(whole.scores, each.scores.sum(1))
    best = method.decompose(ids, position=torch.tensor([[1, 4]]))
    torch.testing.assert_close(best.number[0], predicted.amax(1))


def test_attentions_updates_alone_leave_the_rest_to_the_bias() -> None:
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2")
    whole, updates = ALTILogit(model).decompose(ids, 5), ALTILogit(model).logit_updates(ids, 5)
    attention = ALTILogit(model, "attention").decompose(ids, 5)
    torch.testing.assert_close(attention.scores.sum(1), updates.heads.sum((1, 2)))
    torch.testing.assert_close(attention.bias, whole.bias + updates.embedding + updates.feed_forward.sum(1))
    assert (attention.scores - whole.scores).abs().max() > 1e-3


def test_half_precision() -> None:
    ids = families.inputs("llama")
    expected = ALTILogit(families.build("llama")).decompose(ids, 5)
    half = families.build("llama", dtype=torch.bfloat16)
    rounded = ALTILogit(half).decompose(ids, 5)
    assert rounded.scores.dtype == torch.float32
    assert rounded.convergence_delta.max() < 4e-2
    assert (rounded.scores - expected.scores).norm() < 0.2 * expected.scores.norm()


SEVERAL: Any = [[1, 2]] * 3


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("decompose", {"position": [[1, 2], [3, 4]]}, r"got position=\[\[1, 2\], \[3, 4\]\] for 3 examples"),
        ("decompose", {"position": [[1, 2], [3], [4, 5]]}, "expected as many positions for each example"),
        (
            "decompose",
            {"position": SEVERAL, "target": [[1, 2]] * 2},
            r"got target=\[\[1, 2\], \[1, 2\]\] for 2 values of",
        ),
        ("decompose", {"position": "mean"}, 'got position="mean"; an output is read at one position'),
        ("maps", {"together": torch.ones(2)}, "got together"),
        ("maps", {"together": True}, "has no vectors to add"),
        ("maps", {"per_head": True}, "has no maps of single heads"),
        ("maps", {"last": 2}, "its maps have all rows"),
        ("attribute", {"target": 1, "position": SEVERAL}, "attribute and maps explain one: pass them to decompose"),
    ],
)
def test_wrong_arguments_are_refused(call: str, arguments: Any, message: str) -> None:
    method = ALTILogit(families.build("gpt2"))
    with pytest.raises(InvalidInputError, match=message):
        getattr(method, call)(families.inputs("gpt2", length=7), **arguments)


def test_what_cannot_be_explained_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="returns outputs of shape"):
        ALTILogit(classifier()).decompose(families.inputs("bert"), 1, position=SEVERAL)
    with pytest.raises(UnsupportedScopeError, match="no feed-forward network was understood"):
        ALTILogit(families.build("xmod"), readout=head_of_means).attribute(families.inputs("xmod"), 1)


def test_behind_a_cache_there_are_updates_and_no_scores() -> None:
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2")
    method = ALTILogit(model)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    inputs = {"input_ids": ids[:, 4:], "past_key_values": cache}
    for found, expected in zip(method.logit_updates(inputs, 5), method.logit_updates(ids, 5), strict=True):
        if found is None or expected is None:
            assert found is expected
        else:
            assert (found - expected).abs().max() < 1e-10
    with pytest.raises(InvalidInputError, match="cache"):
        method.decompose(inputs, 5)


def test_layers_may_have_different_numbers_of_heads() -> None:
    stacked = stacked_heads([torch.ones(2, 3), torch.full((2, 1), 2.0)])
    assert stacked.tolist() == [[[1, 1, 1], [2, 0, 0]]] * 2
