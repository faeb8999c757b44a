"""Long runs over text in blocks: what is finished is kept, and several processes may share the work; needs no torch."""

from captum_norm.runs.files import check_folder, sync
from captum_norm.runs.journal import Journal, Record, Setting
from captum_norm.runs.team import Team, torchrun_rank

__all__ = ["Journal", "Record", "Setting", "Team", "check_folder", "sync", "torchrun_rank"]
