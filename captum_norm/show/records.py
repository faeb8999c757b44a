"""Converts scores to records for Captum's text viewer."""

import html
from collections.abc import Sequence

import torch
from captum.attr import visualization

from captum_norm.errors import InvalidInputError
from captum_norm.show.arrays import Numbers, as_array
from captum_norm.show.text import printable, same_length
from captum_norm.text.characters import spelled_out


def text_record(
    tokens: Sequence[str], scores: Numbers, *, label: str, convergence_delta: float | None = None
) -> visualization.VisualizationDataRecord:
    """Create a row for ``captum.attr.visualization.visualize_text``.

    Scores are divided by the largest one, since 1 has the strongest colour in Captum's viewer. Tokens are escaped,
    which Captum's viewer does not do. Norms explain no class: the columns for classes hold the label, the probability
    is 1.

    Args:
        tokens: the texts of the S tokens.
        scores: (S,), a tensor, an array or a list, not negative, in any unit.
        label: the text in the columns for classes, such as the method's name.
        convergence_delta: the method's relative completeness error; 0 if it has none.

    Returns:
        The record; ``attr_score`` is the sum of the original scores.

    Raises:
        InvalidInputError: the scores do not have one number for each token.

    Example:
        >>> import torch
        >>> text_record(["<s>", "hi"], torch.tensor([0.5, 2.0]), label="norm").word_attributions.tolist()
        [0.25, 1.0]
    """
    values = torch.from_numpy(as_array(scores, "scores")).float()
    if values.dim() != 1:
        raise InvalidInputError(f"scores have shape {tuple(values.shape)}; expected (S,), one example at a time")
    same_length(tokens, values.shape[0], "scores")
    top = values.max() if values.numel() else values.new_ones(())
    escaped = html.escape(spelled_out(label))
    return visualization.VisualizationDataRecord(
        word_attributions=values / top if top > 0 else values,
        pred_prob=1.0,
        pred_class=escaped,  # type: ignore[arg-type]  # annotated as int, but only printed
        true_class=escaped,  # type: ignore[arg-type]
        attr_class=escaped,  # type: ignore[arg-type]
        attr_score=float(values.sum()),
        raw_input_ids=[html.escape(printable(token)) for token in tokens],
        convergence_score=0.0 if convergence_delta is None else convergence_delta,
    )
