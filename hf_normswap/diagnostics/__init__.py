"""What norm placement does to a model: measures of gradients, residual stream, collapse, sensitivity, stability and cost.

Each is a function `(model, batches, *, tokenizer=None, ...)` of any supported model, stock or converted, that returns a small
dataclass with `.to_dict()` and `.plot()`. The model stays as it is: weights, modes, hooks, gradients and random state."""

from .collapse import Collapse, collapse
from .cost import Cost, cost
from .gradients import GradientHistory, GradientProfile, gradient_profile
from .sensitivity import Sensitivity, sensitivity
from .stability import Stability, spike_score, stability
from .stream import ResidualStream, residual_stream

__all__ = [
    "Collapse",
    "Cost",
    "GradientHistory",
    "GradientProfile",
    "ResidualStream",
    "Sensitivity",
    "Stability",
    "collapse",
    "cost",
    "gradient_profile",
    "residual_stream",
    "sensitivity",
    "spike_score",
    "stability",
]
