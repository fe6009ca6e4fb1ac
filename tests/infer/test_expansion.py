"""Slopes, curvatures and minima by differences, against derivatives by hand."""

import numpy as np
from helpers.internals import SECOND_STEP, curvature, expansion, minimum, points_around, slopes


def values(x: np.ndarray) -> np.ndarray:
    """sin(x) exp(2y) at points."""
    return np.sin(x[:, 0]) * np.exp(2 * x[:, 1])


def gradient(x: np.ndarray) -> np.ndarray:
    return np.exp(2 * x[1]) * np.array([np.cos(x[0]), 2 * np.sin(x[0])])


def hessian(x: np.ndarray) -> np.ndarray:
    sin, cos = np.sin(x[0]), np.cos(x[0])
    return np.exp(2 * x[1]) * np.array([[-sin, 2 * cos], [2 * cos, 4 * sin]])


POINT = np.array([0.7, -0.4])


def test_slopes_are_derivatives():
    np.testing.assert_allclose(slopes(values(points_around(POINT))), gradient(POINT), rtol=1e-9)
    np.testing.assert_allclose(curvature(gradient, POINT), hessian(POINT), rtol=1e-7)


def test_an_expansion_has_the_derivatives():
    value, slope, second = expansion(values, POINT)
    np.testing.assert_allclose(value, values(POINT[None])[0])
    np.testing.assert_allclose(slope, gradient(POINT), rtol=10 * SECOND_STEP**2)
    np.testing.assert_allclose(second, hessian(POINT), rtol=1e-6)


def test_minimum_and_curvature_are_those_of_a_known_function():
    """From where its Hessian is indefinite, and where a whole Newton step leads uphill."""
    matrix, at = np.array([[3.0, 0.5], [0.5, 40.0]]), np.array([0.3, -0.7])

    def potentials(x):
        quadratic = np.einsum("...i,ij,...j", x - at, matrix, x - at) / 2
        return np.log1p(quadratic) + quadratic / 10

    x, (value, slope, curvature) = minimum(potentials, np.array([3.0, -2.0]), close=1e-3)
    np.testing.assert_allclose(x, at, atol=1e-3)
    np.testing.assert_allclose([value, *slope], 0, atol=5e-2)
    np.testing.assert_allclose(curvature, 1.1 * matrix, rtol=1e-2)
