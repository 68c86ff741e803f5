"""`params.yaml` as typed, frozen, checked objects: the one description of a pipeline."""

from stages.params.data import (
    CorpusParams,
    EmbeddedCorpus,
    FilesCorpus,
    HubCorpus,
    TokenizerParams,
)
from stages.params.loading import Params, ParamsError, check_params, flatten, load_params
from stages.params.run import (
    CheckpointParams,
    EvaluationParams,
    HardwareParams,
    ModelParams,
    TargetName,
    TrackingParams,
    TrainingParams,
)
from stages.params.variant import BlockGroups, MemoryBudget, VariantParams, VariantToPlan

__all__ = [
    "BlockGroups",
    "CheckpointParams",
    "CorpusParams",
    "EmbeddedCorpus",
    "EvaluationParams",
    "FilesCorpus",
    "HardwareParams",
    "HubCorpus",
    "MemoryBudget",
    "ModelParams",
    "Params",
    "ParamsError",
    "TargetName",
    "TokenizerParams",
    "TrackingParams",
    "TrainingParams",
    "VariantParams",
    "VariantToPlan",
    "check_params",
    "flatten",
    "load_params",
]
