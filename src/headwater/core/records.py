"""The records that workflows, datasets and scripts outside the package use, in one place."""

from headwater.core.prompt import Prompt
from headwater.core.request import ModelRequest
from headwater.core.response import ModelResponse
from headwater.core.sampling import SamplingParams
from headwater.core.score import Score
from headwater.core.trajectory import Trajectory

__all__ = ["ModelRequest", "ModelResponse", "Prompt", "SamplingParams", "Score", "Trajectory"]
