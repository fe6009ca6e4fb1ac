"""The covariance SDE, solved by Diffrax."""

from sdeinfer.solve._simulate import simulate as simulate
from sdeinfer.solve._simulate import solve_path as solve_path
from sdeinfer.solve._simulate import step_grid as step_grid
