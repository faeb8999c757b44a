"""Describes models: where the parts of their layers are, and how to declare them where they are not found."""

from captum_norm.models.embeddings import replacement
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import Inputs, check_sequence
from captum_norm.models.layouts import Layout, Scope, Site, register_layout, registered_layouts
from captum_norm.models.model import longest_sequence
from captum_norm.models.objects import Explainable, SentenceSimilarity, opened
from captum_norm.models.offloading import input_device, loaded
from captum_norm.models.outputs import (
    Difference,
    Position,
    chosen_target,
    explained_number,
    name_outputs,
    probability_kind,
)
from captum_norm.models.token_inputs import TokenInputs, bind_tokens
from captum_norm.models.wrappers import explained_module

__all__ = [
    "Difference",
    "Explainable",
    "Inputs",
    "Layout",
    "Position",
    "Scope",
    "SentenceSimilarity",
    "Site",
    "TokenInputs",
    "bind_tokens",
    "check_sequence",
    "chosen_target",
    "evaluating",
    "explained_module",
    "explained_number",
    "input_device",
    "loaded",
    "longest_sequence",
    "name_outputs",
    "opened",
    "probability_kind",
    "register_layout",
    "registered_layouts",
    "replacement",
]
