"""Parameters of residual blocks."""

from sdeinfer.parameters import Parameter, distributions

STRENGTH = Parameter(
    "strength", "g", "strength √u σ of a residual branch", "log", lambda: distributions().LogNormal(-1.0, 2.0)
)
"""The default prior has 95 % between .007 and 19, for strengths of order 1/√L to 1."""

GAIN = Parameter("gain", "w", "gain n σ² of the first projections", "log", lambda: distributions().LogNormal(0.0, 1.0))
TEMPERATURE = Parameter(
    "temperature", "τ", "softmax temperature over √d_k", "log", lambda: distributions().LogNormal(0.0, 1.0)
)
