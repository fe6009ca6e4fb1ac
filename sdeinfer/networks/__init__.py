"""Finite networks: drawn with their weights, or as the exact Markov chain of their covariances."""

from sdeinfer.networks._branches import sample_branches as sample_branches
from sdeinfer.networks._chain import covariance_chain as covariance_chain
from sdeinfer.networks._gradients import sample_gradients as sample_gradients
from sdeinfer.networks._gradients import sample_tangents as sample_tangents
from sdeinfer.networks._sample import sample_layer as sample_layer
from sdeinfer.networks._sample import sample_networks as sample_networks
from sdeinfer.networks._sample import sample_outputs as sample_outputs
from sdeinfer.networks._tokens import tokens_with_covariance as tokens_with_covariance
