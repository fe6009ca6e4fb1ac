"""Likelihoods of observed networks as NumPyro distributions; everything that depends on data only is computed once."""

# Must come first: if arviz-stats is imported before a name of numpyro.distributions, that package lacks submodules.
import numpyro as numpyro

from sdeinfer.likelihood._adjustment import Adjustment as Adjustment
from sdeinfer.likelihood._adjustment import no_adjustment as no_adjustment
from sdeinfer.likelihood._assumptions import Assumptions as Assumptions
from sdeinfer.likelihood._assumptions import checked_priors as checked_priors
from sdeinfer.likelihood._assumptions import support_bounds as support_bounds
from sdeinfer.likelihood._bridge import Span as Span
from sdeinfer.likelihood._bridge import bridge as bridge
from sdeinfer.likelihood._bridges import Bridged as Bridged
from sdeinfer.likelihood._bridges import Bridges as Bridges
from sdeinfer.likelihood._bridges import bridges_of as bridges_of
from sdeinfer.likelihood._full_path import CovariancePath as CovariancePath
from sdeinfer.likelihood._full_path import FullPath as FullPath
from sdeinfer.likelihood._groups import Estimates as Estimates
from sdeinfer.likelihood._groups import GroupedStatistics as GroupedStatistics
from sdeinfer.likelihood._groups import grouped_statistics as grouped_statistics
from sdeinfer.likelihood._layer_step import LayerLaw as LayerLaw
from sdeinfer.likelihood._layer_step import LayerStep as LayerStep
from sdeinfer.likelihood._layer_step import layer_step as layer_step
from sdeinfer.likelihood._model import AbstractModel as AbstractModel
from sdeinfer.likelihood._model import EveryLayer as EveryLayer
from sdeinfer.likelihood._model import Groups as Groups
from sdeinfer.likelihood._model import LatentLayers as LatentLayers
from sdeinfer.likelihood._model import as_model as as_model
from sdeinfer.likelihood._model import layer_in as layer_in
from sdeinfer.likelihood._model import layer_of as layer_of
from sdeinfer.likelihood._moments import Moments as Moments
from sdeinfer.likelihood._moments import at_least_a_quarter as at_least_a_quarter
from sdeinfer.likelihood._moments import moments_of as moments_of
from sdeinfer.likelihood._path import AbstractPath as AbstractPath
from sdeinfer.likelihood._plain import Transitions as Transitions
from sdeinfer.likelihood._plain import transitions_of as transitions_of
from sdeinfer.likelihood._statistics import Layout as Layout
from sdeinfer.likelihood._statistics import PathStatistics as PathStatistics
from sdeinfer.likelihood._statistics import blank_statistics as blank_statistics
from sdeinfer.likelihood._statistics import mean_features as mean_features
from sdeinfer.likelihood._statistics import path_layout as path_layout
from sdeinfer.likelihood._statistics import path_statistics as path_statistics
from sdeinfer.likelihood._statistics import repeated_widths as repeated_widths
from sdeinfer.likelihood._statistics import terms_by_block as terms_by_block
from sdeinfer.likelihood._transitions import USED as USED
from sdeinfer.likelihood._transitions import Path as Path
from sdeinfer.likelihood._transitions import Terms as Terms
from sdeinfer.likelihood._transitions import any_transitions as any_transitions
from sdeinfer.likelihood._transitions import observed_path as observed_path
from sdeinfer.likelihood._transitions import outputs_transitions as outputs_transitions
from sdeinfer.likelihood._transitions import require_densities as require_densities
from sdeinfer.likelihood._transitions import used_of as used_of
from sdeinfer.likelihood._transitions import with_pattern as with_pattern
from sdeinfer.likelihood._transitions import with_used as with_used
