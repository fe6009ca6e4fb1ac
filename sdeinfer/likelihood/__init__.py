"""What networks with given parameters would show, as NumPyro distributions; all that is data is computed once."""

from sdeinfer.likelihood._adjustment import Adjustment as Adjustment
from sdeinfer.likelihood._adjustment import constrained as constrained
from sdeinfer.likelihood._adjustment import unconstrained as unconstrained
from sdeinfer.likelihood._full_path import FullPath as FullPath
from sdeinfer.likelihood._moments import Moments as Moments
from sdeinfer.likelihood._moments import moments_of as moments_of
from sdeinfer.likelihood._program import Program as Program
from sdeinfer.likelihood._program import observing as observing
from sdeinfer.likelihood._statistics import Layout as Layout
from sdeinfer.likelihood._statistics import PathStatistics as PathStatistics
from sdeinfer.likelihood._statistics import path_layout as path_layout
from sdeinfer.likelihood._statistics import path_statistics as path_statistics
from sdeinfer.likelihood._statistics import terms_by_block as terms_by_block
from sdeinfer.likelihood._statistics import variance_ratio as variance_ratio
from sdeinfer.likelihood._transitions import USED as USED
from sdeinfer.likelihood._transitions import Path as Path
from sdeinfer.likelihood._transitions import Terms as Terms
from sdeinfer.likelihood._transitions import observed_path as observed_path
from sdeinfer.likelihood._transitions import require_densities as require_densities
from sdeinfer.likelihood._transitions import transitions as transitions
from sdeinfer.likelihood._transitions import used_of as used_of
from sdeinfer.likelihood._transitions import with_used as with_used
