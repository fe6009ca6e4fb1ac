"""Covariance matrices, the state of the SDE, and its diffusion."""

from sdeinfer.covariance._diffusion import coordinates as coordinates
from sdeinfer.covariance._matrix import equicorrelated as equicorrelated
from sdeinfer.covariance._pattern import CAUSAL as CAUSAL
from sdeinfer.covariance._pattern import Pattern as Pattern
