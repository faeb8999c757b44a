"""Lists the analyses by name."""

from collections.abc import Mapping
from types import MappingProxyType

from captum_norm.lab.analysis.analysis import Analysis
from captum_norm.lab.analysis.component_changes import ComponentChanges
from captum_norm.lab.analysis.dispersion import Dispersion
from captum_norm.lab.analysis.expansion_rate import ExpansionRate
from captum_norm.lab.analysis.frequency import Frequency
from captum_norm.lab.analysis.mixing_ratio import MixingRatio
from captum_norm.lab.analysis.special_tokens import SpecialTokens

ANALYSES: Mapping[str, type[Analysis]] = MappingProxyType(
    {kind.name: kind for kind in (Dispersion, SpecialTokens, Frequency, MixingRatio, ExpansionRate, ComponentChanges)}
)
"""The analyses by their names on the command line."""
