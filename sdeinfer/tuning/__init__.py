"""Choose parameters at a stated risk, and prove it on networks."""

from sdeinfer.tuning._goals import parse_constraint as parse_constraint
from sdeinfer.tuning._goals import parse_criterion as parse_criterion
from sdeinfer.tuning._recipes import recipe_for as recipe_for
from sdeinfer.tuning._recipes import standard_deviations as standard_deviations
from sdeinfer.tuning._transfer import Transfer as Transfer
from sdeinfer.tuning._transfer import transfer as transfer
from sdeinfer.tuning._tune import tune as tune
from sdeinfer.tuning._tuned import Tuned as Tuned
