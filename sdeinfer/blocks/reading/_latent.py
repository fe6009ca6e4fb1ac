"""Latent attention as the values of a pass show it. Tests: `tests/blocks/test_of.py`."""

import math
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks.reading._attention import heads_of, nodes_of_softmax, read_softmax
from sdeinfer.blocks.reading._facts import BranchFacts
from sdeinfer.blocks.reading._pass_values import float_array
from sdeinfer.blocks.reading._values import base_of_rotations
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Taps


def latent_matrices(facts: BranchFacts) -> dict[str, tuple[Matrix, Node]]:
    """The matrices of latent attention by their places."""
    branch = facts.branch
    reads = {reading.name for reading in branch.readings}
    pairs = {matrix.name: (matrix, node) for role in branch.matrices.values() for matrix, node in role}
    keys = [pair for role in ("key", "value") for pair in branch.matrices.get(role, ())]
    unique = {matrix.array: (matrix, node) for matrix, node in keys}
    compressed = [pair for pair in unique.values() if pair[0].name in reads]
    expanded = [pair for pair in unique.values() if pair[0].name not in reads]
    queries, reading = branch.matrices["query"], branch.matrices.get("reads", [])
    if len(compressed) != 1 or len(expanded) != 1 or len(queries) != 1 or len(reading) > 1:
        raise InputError(f"model: {branch.where}: its matrices are not those of latent attention: {', '.join(pairs)}")
    places = {"queries": queries[0], "compressed keys": compressed[0], "keys and values": expanded[0]}
    return places | ({"compressed queries": reading[0]} if reading else {})


def tap_latent_attention(account: Account, facts: BranchFacts, taps: Taps, faults: list[str]) -> None:
    """Read sizes, ranks, the mean squares of compressed tokens, and the base of the rotations."""
    branch, heads, places = facts.branch, heads_of(account, facts), latent_matrices(facts)
    (query, of_query), (down, of_down), (up, of_up) = (
        places[name] for name in ("queries", "compressed keys", "keys and values")
    )
    count, rank = heads.logits.heads, up.fan_in
    rotated = down.fan_out - rank
    size = query.fan_out // count - rotated
    value_size = up.fan_out // count - size
    query_rank = query.fan_in if "compressed queries" in places else None
    if min(rotated, size, value_size) < 1 or heads.logits.head_size != size + rotated:
        raise InputError(f"model: {branch.where}: sizes of heads are not those of latent attention")
    if heads.logits.normed or heads.capped is not None:
        raise InputError(f"model: {branch.where}: has norms of queries and keys, or a cap, beside latent attention")
    facts.shape = {"heads": count, "head_size": size, "rotated_size": rotated, "value_size": value_size}
    facts.shape |= {"key_rank": rank, "query_rank": query_rank}
    facts.factors = {"logits": heads.logits.factor * math.sqrt(size + rotated)}

    def take(values: dict[str, Any]) -> None:
        mask = read_softmax(facts, heads, values, faults)
        if mask is None:
            return
        if facts.shape.pop("sink"):
            faults.append(f"{branch.where}: has a sink beside latent attention")
            return
        del facts.shape["cap"]  # none
        tokens = len(mask)
        for name in ("query", "key"):
            facts.factors[f"read by {name}"] = float(np.square(float_array(values[name])).mean())
        before = float_array(values["down"]).reshape(-1, tokens, rank + rotated)[:, None, :, rank:]
        keys = float_array(values["keys"])
        keys = keys if keys.shape[-1] == size + rotated else keys.swapaxes(-1, -2)
        after = keys.reshape(-1, count, tokens, size + rotated)[:, :1, :, size:]
        after = after * np.sqrt(np.square(before).mean() / np.square(after).mean())  # keys may have a factor
        pairs = before.reshape(*before.shape[:-1], -1, 2)
        for start in (before, np.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)):
            base = base_of_rotations(start, after, tokens)
            if base is not None:
                facts.shape["rope"] = base
                return
        faults.append(f"{branch.where}: shared keys are changed in another way than by rotations")

    nodes = nodes_of_softmax(heads) | {"query": of_query.inputs[0], "key": of_up.inputs[0], "down": of_down}
    taps.see(f"{branch.where}: its latent attention", nodes | {"keys": heads.products.inputs[1]}, take)
