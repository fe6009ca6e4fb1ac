"""Solve the covariance SDE by Diffrax, or by a scan; docs/theory/solver.md describes a step.

`solve_from_key` solves for paths in one of two ways, which agree. Both step by `PSDSplitting`.

- Concrete arguments: `solve_in_blocks` → `solve_paths`, Diffrax's loop; one program serves all grids.
- Traced arguments: `scan_in_blocks` → `scan_paths`, a scan that is differentiable in every mode; one program per grid.
"""

from sdeinfer.solve._psd import BrownianSteps as BrownianSteps
from sdeinfer.solve._psd import CovarianceTerm as CovarianceTerm
from sdeinfer.solve._psd import PSDSplitting as PSDSplitting
from sdeinfer.solve._simulate import simulate as simulate
from sdeinfer.solve._stopped import Reason as Reason
from sdeinfer.solve._stopped import StoppedPaths as StoppedPaths
from sdeinfer.solve._stopped import simulate_stopped as simulate_stopped
from sdeinfer.solve._stopped import stopping_times as stopping_times
from sdeinfer.solve._tangents import TangentPaths as TangentPaths
from sdeinfer.solve._tangents import tangents as tangents
