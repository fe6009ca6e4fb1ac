"""Settings of a fit that the command line shares; this module must not import other modules of the package.

Tests: `tests/infer/test_fit.py`.
"""

from typing import Literal

Law = Literal["finite-width", "limit"]

ADJUSTED_LIKELIHOOD = "adjusted_log_likelihood"
"""Name of the group with the log likelihood that the sampler used, where it is not the density of the data: the
adjustment widens it. Weights that leave a network out of a posterior are those of this group."""

MOST_DRAWS = 100
"""Draws of the parameters at which data are replicated by default."""

LARGEST_LOGIT = 0.6
"""Default bound on the spread of the logits, see `in_range`. For data far outside its range the law estimates a spread
of 0.6 to 1.6, never a small one, so this bound excludes them."""
