"""Blocks of a model, read from one pass and its weights.

A pass gives the branches and what they compute (`passes`): `_reader` describes each by facts that no weights change,
`_sizes` by variances of its matrices, and `_of` makes the stack.
"""
