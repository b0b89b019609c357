"""Models cut by block: stages without weights, initial weights, loss, measured costs. Imports torch."""

import os

# Nothing that trains may reach the hub, whatever a configuration says; this must precede the import of
# transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

from starlings_job.data.batch import Batch, decode_prompt, decode_records, loss_sum, next_token
from starlings_job.description import ModelDescription
from starlings_job.model.initial import initial_state
from starlings_job.model.measure import measure_profile
from starlings_job.model.stage import Model, StageModule, build_stage, tied_parameters
from starlings_job.model.tensors import raw_tensor, torch_tensor

__all__ = [
    "Batch",
    "Model",
    "ModelDescription",
    "StageModule",
    "build_stage",
    "decode_prompt",
    "decode_records",
    "initial_state",
    "loss_sum",
    "measure_profile",
    "next_token",
    "raw_tensor",
    "tied_parameters",
    "torch_tensor",
]
