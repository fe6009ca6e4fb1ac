"""Parameters of residual blocks."""

from sdeinfer.parameters import Parameter, distributions

LOG_STRENGTH = (-1.0, 2.0)
"""Prior mean and standard deviation of log g: 95 % between .007 and 19, for strengths of order 1/√L to 1."""

STRENGTH = Parameter(
    "strength", "g", "strength √u σ of a residual branch", "log", lambda: distributions().LogNormal(*LOG_STRENGTH)
)
GAIN = Parameter("gain", "w", "gain n σ² of the first projections", "log", lambda: distributions().LogNormal(0.0, 1.0))
TEMPERATURE = Parameter(
    "temperature", "τ", "softmax temperature over √d_k", "log", lambda: distributions().LogNormal(0.0, 1.0)
)
