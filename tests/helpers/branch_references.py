"""What a Dataset of residual branches holds, as sums over indices; without an import of the package."""

import numpy as np


def branch_sums(U, D):
    """The variables of one network from U and D of its branches, shape (branches, tokens, width)."""
    branches, m, n = U.shape
    B, M, N = range(branches), range(m), range(n)

    def product(X, Y):
        return np.array([[sum(X[a, j] * Y[b, j] for j in N) / n for b in M] for a in M])

    increment = np.array([product(D[b], D[b]) for b in B])
    inverse = np.array([np.linalg.inv(S) for S in increment])
    squares = [sum((D[b][:, j] @ inverse[b] @ D[b][:, j]) ** 2 for j in N) / n for b in B]
    return {
        "input": np.array([product(U[b], U[b]) for b in B]),
        "mean": np.array([[sum(U[b, a]) / n for a in M] for b in B]),
        "cross": np.array([product(U[b], D[b]) for b in B]),
        "increment": increment,
        "between": np.array([[product(D[b], D[c]) for c in B] for b in B]),
        "kurtosis": np.array(squares) / (m * (m + 2)),
    }


def assert_branches(data, U, D, tolerance=1e-9):
    """Compare a Dataset with U and D of shape (networks, branches, tokens, width)."""
    for number, (u, d) in enumerate(zip(U, D, strict=True)):
        for name, expected in branch_sums(np.asarray(u, np.float64), np.asarray(d, np.float64)).items():
            found = data[name].values[number]
            assert found.dtype == np.float64
            # The mean vanishes after a norm.
            scale = np.sqrt(np.mean(np.square(u))) if name == "mean" else np.abs(expected).max()
            # The kurtosis divides by increments that uniform attention makes nearly parallel.
            rtol = 1e3 * tolerance if name == "kurtosis" else tolerance
            np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * scale, err_msg=name)
    assert len(U) == data.sizes["network"]
