"""From models and data to posteriors."""

from sdeinfer.infer._fit import architecture_of as architecture_of
from sdeinfer.infer._fit import fit as fit
from sdeinfer.infer._fit import require_identifiable as require_identifiable
from sdeinfer.infer._nuts import Draws as Draws
from sdeinfer.infer._nuts import Problem as Problem
from sdeinfer.infer._nuts import nuts as nuts
from sdeinfer.infer._predictive import predict as predict
