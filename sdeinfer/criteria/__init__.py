"""Criteria of an initialisation: Jacobians, gradients and their exponents, with their spread over networks."""

from sdeinfer.criteria._exponents import Exponents as Exponents
from sdeinfer.criteria._exponents import exponents as exponents
from sdeinfer.criteria._exponents import repeated_token as repeated_token
from sdeinfer.criteria._gradients import GradientNorms as GradientNorms
from sdeinfer.criteria._gradients import gradient_norms as gradient_norms
from sdeinfer.criteria._gradients import squared_jacobian_norm as squared_jacobian_norm
