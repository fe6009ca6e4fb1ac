"""One forward pass of a network of PyTorch or JAX: its record, graph, residual streams, attentions and matrices."""
