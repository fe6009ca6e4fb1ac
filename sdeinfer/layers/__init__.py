"""One architecture, one room: its finite layer and its limit side by side."""

from sdeinfer.layers._attention import ShapedAttention as ShapedAttention
from sdeinfer.layers._base import AbstractLayer as AbstractLayer
from sdeinfer.layers._base import check_parameters as check_parameters
from sdeinfer.layers._feedforward import ResidualFeedForward as ResidualFeedForward
from sdeinfer.layers._finite_width import ATTENTION_NEXT as ATTENTION_NEXT
from sdeinfer.layers._finite_width import VARIANCE_FEATURES as VARIANCE_FEATURES
from sdeinfer.layers._finite_width import FiniteWidth as FiniteWidth
from sdeinfer.layers._finite_width import drift_terms as drift_terms
from sdeinfer.layers._finite_width import variance_terms as variance_terms
from sdeinfer.layers._limit import Limit as Limit
from sdeinfer.layers._limit import attention_drift as attention_drift
from sdeinfer.layers._limit import attention_drift_vectors as attention_drift_vectors
from sdeinfer.layers._limit import causal_attention_drift as causal_attention_drift
from sdeinfer.layers._limit import causal_drift_vectors as causal_drift_vectors
from sdeinfer.layers._mlp import ShapedMLP as ShapedMLP
from sdeinfer.layers._names import ARCHITECTURES as ARCHITECTURES
from sdeinfer.layers._names import SIZES as SIZES
from sdeinfer.layers._names import Architecture as Architecture
from sdeinfer.layers._names import architecture_in as architecture_in
from sdeinfer.layers._names import architecture_named as architecture_named
from sdeinfer.layers._names import architecture_of_layer as architecture_of_layer
from sdeinfer.layers._relu import relu_alignment as relu_alignment
from sdeinfer.layers._relu import relu_drift as relu_drift
from sdeinfer.layers._relu import shaped_relu as shaped_relu
from sdeinfer.layers._stack import ShapedTransformer as ShapedTransformer
from sdeinfer.layers._stack import Stack as Stack
