"""MLPs and mixtures of experts as the values of a pass show them. Tests: `tests/blocks/test_of.py`."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks._experts import SCORES, weights_of_experts
from sdeinfer.blocks.reading._facts import BranchFacts
from sdeinfer.blocks.reading._pass_values import float_array, outputs_of_matrix, with_bias
from sdeinfer.blocks.reading._values import FORMULA_TOLERANCE, activations_of_values, gated_activations
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Taps


def tap_mlp(account: Account, facts: BranchFacts, taps: Taps, faults: list[str]) -> None:
    """Read the number of units, the gate and the activation."""
    branch, width = facts.branch, facts.branch.link.sum.shape[-1]
    gated = "gate" in branch.matrices
    matrix, first = branch.matrices["gate" if gated else "up"][0]
    up, right = branch.matrices["up"][0]
    (last, down), units = branch.matrices["mlp output"][0], branch.matrices["mlp output"][0][0].fan_in
    facts.shape = {"gated": gated, "expansion": units / width}

    def take(values: dict[str, Any]) -> None:
        h, z = float_array(values["h"]).reshape(-1, units), outputs_of_matrix(values["z"], matrix)
        if h.shape != z.shape:
            faults.append(f"{branch.where}: {last.name} reads other units than {matrix.name} makes")
            return
        if gated:
            facts.activations, facts.shape["offset"] = gated_activations(z, outputs_of_matrix(values["right"], up), h)
        else:
            facts.activations = activations_of_values(z, h)
        if not facts.activations:
            faults.append(f"{branch.where}: its activation is none of si.blocks.ACTIVATIONS")

    nodes = {"z": with_bias(account, first), "right": with_bias(account, right), "h": down.inputs[0]}
    taps.see(f"{branch.where}: its activation", nodes, take)


def tap_experts(account: Account, facts: BranchFacts, taps: Taps, faults: list[str]) -> None:
    """Read the numbers of experts and of chosen ones, their weights, and units as those of an MLP."""
    branch, width = facts.branch, facts.branch.link.sum.shape[-1]
    router, of_router = branch.matrices["router"][0]
    count = router.fan_out
    of_experts, shared = _experts_and_shared(facts, count)
    (_, first), (_, down) = of_experts["up"][0], of_experts["mlp output"][0]
    units = of_experts["mlp output"][0][0].fan_in
    packed = of_experts["up"][0][0].fan_out == 2 * units
    gated = packed or "gate" in of_experts
    weighted = _weighted(account, branch.nodes, down)
    if weighted is None:
        raise InputError(f"model: {branch.where}: no weights of its experts are seen after their last matrix")
    facts.shape = {"experts": count, "gated": gated, "expansion": units / width}
    facts.shape["shared"] = 0.0 if not shared else shared["mlp output"][0][0].fan_in / width

    def take(values: dict[str, Any]) -> None:
        h, products = float_array(values["h"]).reshape(-1, units), float_array(values["z"])
        if packed:
            sides = [products[:, :units], products[:, units:]], [products[:, ::2], products[:, 1::2]]
            readings = [gated_activations(z, linear, h) for z, linear in sides]
            facts.activations, facts.shape["offset"] = max(readings, key=lambda reading: len(reading[0]))
        elif gated:
            z, linear = (
                outputs_of_matrix(values["gate"], of_experts["gate"][0][0]),
                outputs_of_matrix(values["z"], of_experts["up"][0][0]),
            )
            facts.activations, facts.shape["offset"] = gated_activations(z, linear, h)
        else:
            facts.activations = activations_of_values(products.reshape(-1, units), h)
        if not facts.activations:
            faults.append(f"{branch.where}: the activation of its experts is none of si.blocks.ACTIVATIONS")
        _read_weights(facts, float_array(values["p"]), float_array(values["r"]).reshape(-1, count), faults)

    nodes = {"z": first, "h": down.inputs[0], "p": weighted, "r": with_bias(account, of_router)}
    nodes |= {"gate": of_experts["gate"][0][1]} if "gate" in of_experts else {}
    taps.see(f"{branch.where}: its experts", nodes, take)


def _experts_and_shared(
    facts: BranchFacts, count: int
) -> tuple[dict[str, list[tuple[Matrix, Node]]], dict[str, list[tuple[Matrix, Node]]]]:
    """The matrices of experts, which are parts of one array, and those of an expert that all tokens share."""
    of_experts, shared = {}, {}
    for role, matrices in facts.branch.matrices.items():
        arrays = [matrix.array for matrix, _ in matrices]
        for matrix, node in matrices:
            if role != "router":
                group = of_experts if arrays.count(matrix.array) == count else shared
                group.setdefault(role, []).append((matrix, node))
    where = facts.branch.where
    if not {"up", "mlp output"} <= of_experts.keys():
        raise InputError(f"model: {where}: its experts are not parts of one array for each role")
    if any(len(matrices) > 1 for matrices in shared.values()):
        raise InputError(f"model: {where}: has several shared experts")
    if shared and shared.keys() != of_experts.keys():
        raise InputError(f"model: {where}: its shared expert is of another kind than the others")
    gated = {source.node.parameters[0]: source.gated for source in facts.branch.writers}
    if shared and gated.get(shared["mlp output"][0][0].array, True):
        raise InputError(f"model: {where}: has a gate of its shared expert")
    return of_experts, shared


def _weighted(account: Account, nodes: list[Node], down: Node) -> Node | None:
    """The weights that multiply what the experts return."""
    graph = account.graph
    for node in nodes:
        if node.kind == "gate" and graph.has(node, down) and len(node.inputs) == 2:
            for side, opposite in (node.inputs, node.inputs[::-1]):
                if side.shape[-1:] == (1,) and not graph.has(side, down) and graph.has(opposite, down):
                    return side
    return None


def _read_weights(facts: BranchFacts, p: np.ndarray, logits: np.ndarray, faults: list[str]) -> None:
    """Read how weights follow from the router's logits, up to a factor."""
    seen = np.sort(p.ravel())
    chosen = len(seen) // len(logits)
    if chosen * len(logits) == len(seen) and 0 < chosen <= logits.shape[1]:
        for scores in SCORES:
            weights = np.asarray(weights_of_experts(jnp.asarray(logits), chosen, scores))
            ratio = seen / np.sort(weights[weights > 0])
            scale = float(np.median(ratio))
            if np.abs(ratio / scale - 1).max() < 10 * FORMULA_TOLERANCE and math.isfinite(scale):
                facts.shape |= {"chosen": chosen, "scores": scores, "scale": float(f"{scale:.4g}")}
                return
    faults.append(f"{facts.branch.where}: the weights of its experts are another function of the router's logits")
