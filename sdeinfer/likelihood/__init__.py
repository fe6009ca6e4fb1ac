"""Likelihoods of observed networks as NumPyro distributions; everything that depends on data only is computed once."""

from sdeinfer import _numpyro as _numpyro
from sdeinfer.likelihood._full_path import CovariancePath as CovariancePath
from sdeinfer.likelihood._model import AbstractModel as AbstractModel
from sdeinfer.likelihood._transitions import any_transitions as any_transitions
from sdeinfer.likelihood._transitions import with_pattern as with_pattern
