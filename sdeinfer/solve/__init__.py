"""Solve the covariance SDE with Diffrax."""

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
