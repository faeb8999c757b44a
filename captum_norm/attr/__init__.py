"""The attribution methods, one per file."""

from captum_norm.attr.alti import ALTI
from captum_norm.attr.alti_logit import ALTILogit
from captum_norm.attr.attention_block import AttentionBlockAttribution, GlobEnc
from captum_norm.attr.attention_gradient import AttentionTimesGradient
from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.flow_graph import FlowEdge, FlowGraph, FlowNode
from captum_norm.attr.frozen.decompx import DecompX
from captum_norm.attr.frozen.lrp import CPLRP, GIM, AttnLRP
from captum_norm.attr.information_flow import InformationFlow
from captum_norm.attr.layer_maps import TOLERANCE
from captum_norm.attr.logit_updates import LogitUpdates
from captum_norm.attr.measurements import Measurements
from captum_norm.attr.norms import NormAttribution, NormMeter
from captum_norm.attr.output import Decomposition
from captum_norm.attr.tokens import TokenAttribution
from captum_norm.attr.value_zeroing import ValueZeroing
from captum_norm.attr.weights import AttentionRollout, AttentionWeights
from captum_norm.forward.session import MeterOptions
from captum_norm.results.maps import SourceAndPrefix

__all__ = [
    "ALTI",
    "CPLRP",
    "GIM",
    "TOLERANCE",
    "ALTILogit",
    "AttentionBlockAttribution",
    "AttentionMapAttribution",
    "AttentionRollout",
    "AttentionTimesGradient",
    "AttentionWeights",
    "AttnLRP",
    "DecompX",
    "Decomposition",
    "FlowEdge",
    "FlowGraph",
    "FlowNode",
    "GlobEnc",
    "InformationFlow",
    "LogitUpdates",
    "Measurements",
    "MeterOptions",
    "NormAttribution",
    "NormMeter",
    "SourceAndPrefix",
    "TokenAttribution",
    "ValueZeroing",
]
