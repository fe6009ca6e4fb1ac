"""Finite networks, with their weights."""

from sdeinfer.networks._sample import sample_networks as sample_networks
from sdeinfer.networks._tokens import tokens_with_covariance as tokens_with_covariance
