"""The matrices in one array against their entries by index; errors of ratios."""

import math

import numpy as np
import pytest
from helpers.internals import Declared, Law, Node, Places, Row, StoredTensor, places_of

import sdeinfer as si


@pytest.mark.parametrize("outputs_first", [True, False])
def test_places_are_those_by_index(outputs_first):
    """Of block e, of outputs c and inputs j: entry (e, c, j) or (e, j, c)."""
    rng, columns = np.random.default_rng(0), np.array([1, 4, 5])
    array = rng.standard_normal((3, 6, 4) if outputs_first else (3, 4, 6))
    flat = array.ravel()
    by_input, by_output = (1, 4) if outputs_first else (6, 1)
    places = Places(2 * 24 + by_input * np.arange(4), by_output * np.arange(6), columns, outputs_first)
    expected = array[2][columns] if outputs_first else array[2][:, columns]
    assert places.shape == expected.shape
    part = places.of(StoredTensor(array.shape, flat.__getitem__, flat.min(), flat.max()))
    np.testing.assert_array_equal(part.entries(), expected.ravel())
    np.testing.assert_array_equal(part.read(np.array([0, 7, 11])), expected.ravel()[[0, 7, 11]])


def product(shape, fan_in, fan_out):
    weight = Node("parameter", (), shape, "W", ("W",), fixed=True)
    about = {"fan_in": fan_in, "fan_out": fan_out, "weight": weight, "outputs_last": True}
    return Node("product", (), (2, fan_out), "dot_general", ("W",), about=about)


def of(shape):
    return StoredTensor(shape, np.zeros(math.prod(shape)).__getitem__)


@pytest.mark.parametrize(
    ("shape", "columns", "labels"),
    [
        ((8, 24), {"query": np.arange(8), "key": np.arange(8, 24)}, ["query", "key"]),
        ((5, 8, 24), {"up": np.arange(24)}, ["0", "1", "2", "3", "4"]),
        ((2, 8, 24), {"gate": np.arange(12), "up": np.arange(12, 24)}, ["gate, 0", "up, 0", "gate, 1", "up, 1"]),
        ((8, 24), {"query": None, "key": np.arange(8)}, []),
        ((8, 24), {"query": np.arange(9), "key": np.arange(8, 24)}, []),
        ((8, 24), {"up": np.arange(24)}, []),
    ],
)
def test_arrays_are_cut_where_their_layout_is_known(shape, columns, labels):
    found = places_of(product(shape, 8, 24), of(shape), columns)
    assert list(found) == labels
    seen = [places(np.arange(places.size)) for _, places in found.values()]
    if found:
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(math.prod(shape)))


def test_the_error_of_a_ratio_has_both_errors():
    matrix = si.auditing.Matrix("up", 64, 64, 64, 3)
    law = Law(800, 800, 0.0, 1.1, 0.0, 3.0, "normal")
    row = Row(matrix, law, Declared(0.0, 1.0, "normal", error=0.04))
    assert row.error == pytest.approx(math.sqrt(1 / 1600 + 0.04**2))


def test_a_scalar_of_0_is_not_drawn():
    """It has no logarithm of a ratio."""
    X = np.random.default_rng(0).standard_normal((8, 16))
    parameters = {"W": 0.02 * np.random.default_rng(1).standard_normal((16, 16)), "scale": np.zeros(())}
    audited = si.audit(
        (lambda parameters, x: x + x @ parameters["W"] * (1 + parameters["scale"]), parameters),
        X,
        recipe={"W": 0.02, "scale": 0.02},
    )
    assert not audited.passed
    assert "scale is 0, where entries are drawn" in audited.verdict
