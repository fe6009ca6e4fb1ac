"""From models and data to posteriors."""

from sdeinfer.infer._expansion import expanded_statistics as expanded_statistics
from sdeinfer.infer._fit import LIMIT_POSTERIOR as LIMIT_POSTERIOR
from sdeinfer.infer._fit import Law as Law
from sdeinfer.infer._fit import architecture_of as architecture_of
from sdeinfer.infer._fit import fit as fit
from sdeinfer.infer._fit import require_identifiable as require_identifiable
from sdeinfer.infer._mode import Mode as Mode
from sdeinfer.infer._mode import posterior_mode as posterior_mode
from sdeinfer.infer._mode import potential as potential
from sdeinfer.infer._nuts import Draws as Draws
from sdeinfer.infer._nuts import Problem as Problem
from sdeinfer.infer._nuts import nuts as nuts
from sdeinfer.infer._predictive import predict as predict
from sdeinfer.infer._range import LARGEST_LOGIT as LARGEST_LOGIT
from sdeinfer.infer._range import in_range as in_range
from sdeinfer.infer._range import logit_scale as logit_scale
