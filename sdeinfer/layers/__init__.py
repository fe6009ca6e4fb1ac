"""Shaped layers: the finite-width layer and its covariance limit, one architecture per file."""

from sdeinfer.layers._attention import ShapedAttention as ShapedAttention
from sdeinfer.layers._base import AbstractLayer as AbstractLayer
from sdeinfer.layers._feedforward import ResidualFeedForward as ResidualFeedForward
from sdeinfer.layers._feedforward import ShapedMLP as ShapedMLP
from sdeinfer.layers._feedforward import shaped_relu as shaped_relu
from sdeinfer.layers._finite_width import FiniteWidth as FiniteWidth
from sdeinfer.layers._over_depth import OverDepth as OverDepth
from sdeinfer.layers._stack import ShapedTransformer as ShapedTransformer
from sdeinfer.layers._stack import Stack as Stack
from sdeinfer.layers._templates import kind_in_words as kind_in_words
from sdeinfer.layers._templates import template as template
from sdeinfer.terms._limit import Limit as Limit
