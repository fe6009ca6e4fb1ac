"""Solve the covariance SDE with Diffrax."""

from sdeinfer.solve._blocks import solve_in_blocks as solve_in_blocks
from sdeinfer.solve._brownian import BrownianArray as BrownianArray
from sdeinfer.solve._brownian import BrownianSteps as BrownianSteps
from sdeinfer.solve._grid import Grid as Grid
from sdeinfer.solve._grid import step_grid as step_grid
from sdeinfer.solve._paths import fill_after as fill_after
from sdeinfer.solve._paths import in_blocks as in_blocks
from sdeinfer.solve._paths import solve_paths as solve_paths
from sdeinfer.solve._psd import CovarianceTerm as CovarianceTerm
from sdeinfer.solve._psd import PSDEuler as PSDEuler
from sdeinfer.solve._simulate import simulate as simulate
from sdeinfer.solve._simulate import simulate_from as simulate_from
from sdeinfer.solve._stopped import Reason as Reason
from sdeinfer.solve._stopped import StoppedPaths as StoppedPaths
from sdeinfer.solve._stopped import simulate_stopped as simulate_stopped
from sdeinfer.solve._stopped import stopping_times as stopping_times
