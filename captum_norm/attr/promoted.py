"""Names the tokens that components promote: those whose logits rise most by what a component writes directly.

What the output embedding reads where an output is read is split, coordinate by coordinate, into what heads, networks
and neurons write, as ALTI-Logit splits a logit; the embedding makes logits of each part.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from captum_norm.attr.alti_logit import ALTILogit
from captum_norm.attr.frozen.components import ComponentNetwork, ComponentRequest
from captum_norm.attr.logit_updates import Tracing
from captum_norm.attr.output import OutputAttribution, RelevanceAttribution
from captum_norm.errors import CaptumNormError, UnsupportedModelError
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import hooked
from captum_norm.models.outputs import OutputValues, Position, output_names, output_scores
from captum_norm.results.components import ComponentScore, ComponentScores, Promoted

STRONGEST = 100  # components of a kind whose tokens are named


@dataclass(frozen=True, eq=False)
class EmbeddedValues(OutputValues):
    """The coordinates of what the output embedding reads; ``seen`` has its ends, and the slopes of logits in these."""

    seen: dict[str, Any] = field(default_factory=dict)

    def read(self, call: ModelCall, output: Any) -> tuple[Tensor, Tensor]:
        """Return the coordinates and their sizes, (B, D) each."""
        logits, made = output_scores(call, output, self.position, None).sum(), self.seen.get("output")
        (slopes,) = [None] if made is None else torch.autograd.grad(logits, made, retain_graph=True, allow_unused=True)
        if slopes is None:
            raise UnsupportedModelError("its output embedding does not make them")
        self.seen["slopes"] = output_scores(call, slopes, self.position, None)
        states = output_scores(call, self.seen["input"], self.position, None)
        return states, states.detach().abs()


def promoted_tokens(
    method: OutputAttribution, call: ModelCall, position: Position, scores: ComponentScores, count: int
) -> list[Promoted]:
    """Name the tokens that the strongest components of each kind promote where an output is read."""
    model, kinds = method.model, [kind for kind in scores.parts if kind in ("heads", "feed_forward", "neurons")]
    embedding: Any = getattr(model, "get_output_embeddings", lambda: None)()
    width, refused = getattr(embedding, "in_features", None), f"got promoted={count} for {type(model).__name__}"
    if width is None or method.readout is not None or not kinds:
        raise UnsupportedModelError(
            f"{refused} and {', '.join(scores.parts)}; expected heads, feed_forward or neurons, and logits that an "
            "output embedding makes: leave it out"
        )
    values, splitting = EmbeddedValues(None, position, None, None, call.batch, width, several=True), ALTILogit(model)
    ends: Any = [(embedding, end, lambda _, t, end=end: values.seen.update({end: t})) for end in ("input", "output")]
    splitting.session = method.session
    try:
        with hooked(ends):
            tracing = splitting.traced(call, values, maps=False)
    except CaptumNormError as error:
        raise UnsupportedModelError(f"{refused}, whose logits are not split: {error}; leave it out") from error
    slopes, updates, fired = values.seen["slopes"], tracing.logit_updates(), None
    token = output_names(model, slopes.shape[1], method.session.tokenizer)
    if "neurons" in kinds and isinstance(method, RelevanceAttribution):
        fired, _ = method.run_plain(call, ComponentRequest(("neurons",)), ComponentNetwork)

    def written(example: int, row: ComponentScore) -> Tensor:
        if fired is not None and row.kind == "neurons":
            return neuron_update(tracing, fired, example, row)
        heads: Any = updates.cross_heads if row.stack == "cross" else updates.heads
        part: Tensor = heads[..., row.number] if row.kind == "heads" else updates.feed_forward
        return part[example, :, row.layer]

    promoted = list[Promoted]()
    for example, single in enumerate(scores):
        rows = [row for kind in kinds for row in single.top(STRONGEST, kind)]
        rows = [row for row in rows if call.encoder is None or row.stack != "encoder"]  # which writes to no output
        vectors = torch.stack([written(example, row) for row in rows]).to(slopes)
        with torch.no_grad():
            logits = (embedding(vectors) - embedding(torch.zeros_like(vectors[:1]))) * slopes[example]
        best, index = logits.topk(min(count, slopes.shape[1])).indices.tolist(), single.outputs[0].index
        explained = [i for i in (index if isinstance(index, tuple) else (index,)) if i is not None]
        named = {}
        for row, rises, most in zip(rows, logits.tolist(), best, strict=True):
            chosen = [*most, *(i for i in explained if i not in most)]
            named[f"{row.stack} {row.kind} {row.name}"] = [(token(i), rises[i]) for i in chosen]
        promoted.append(named)
    return promoted


def neuron_update(tracing: Tracing, fired: ComponentNetwork, example: int, row: ComponentScore) -> Tensor:
    """Compute what a neuron adds to an example's values, (P,): its activation times what its output weights do."""
    reading, count = tracing.reading, len(tracing.reading.number) // tracing.call.batch
    taps = sorted(tap for tap in fired.activations if tap.layer == row.layer and tap.role != "encoder")
    behind = ((place, block.feed_forward) for place, block in tracing.path.items() if place.index == row.layer)
    place, block = next((place, block) for place, block in behind if block is not None)
    mine, g = reading.examples == example, tracing.updates[place].at_network
    weight = torch.cat([reader.outer.weight(g.dtype) for reader in block.dense])[row.number]
    activations = torch.cat([fired.by_position(fired.activations[tap]) for tap in taps], -1)[..., row.number]
    parts = (g[mine] @ weight.to(g.device)) * activations[example, reading.positions[mine]].to(g)
    return parts.new_zeros(count).index_add(0, reading.outputs[mine] % count, parts)
