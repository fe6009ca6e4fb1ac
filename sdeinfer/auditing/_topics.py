"""The topics of tests and findings. Tests: `tests/auditing/test_kinds.py`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Topic:
    """A subject of tests.

    Attributes:
        fails: what fails, in words.
        alone: whether it fails an audit without a recipe; `allow=` takes it off.
        one_clause: whether failed tests of several tensors are one clause of a verdict.
        of_code: whether a model's class may do it in its code, and not say so in its configuration.
        note: whether it never fails, and is said beside a verdict.
    """

    fails: str
    alone: bool = False
    one_clause: bool = False
    of_code: bool = False
    note: bool = False


TOPICS = {
    "not finite": Topic("NaN or infinity in a parameter, a buffer or a sum of the stream", alone=True),
    "dropout": Topic("a dropout that runs in evaluation mode", alone=True),
    "outliers": Topic("entries of a matrix that are many standard deviations away", alone=True),
    "copies": Topic("tensors with equal or correlated entries that are not tied", alone=True),
    "shards": Topic("a matrix with equal slices, as of ranks or heads that share a seed", alone=True),
    "series": Topic("branches that are not added to one stream, one after the other", alone=True, of_code=True),
    "softmax": Topic("probabilities of attention that do not sum to 1 over keys", alone=True),
    "norm": Topic(
        "a norm by another power of the mean square, or one that is not over features", alone=True, one_clause=True
    ),
    "norms": Topic("a norm that is not where norms are declared", one_clause=True),
    "queries": Topic(
        "keys that read the stream itself where queries read its norm, or values of another tensor than keys",
        alone=True,
    ),
    "heads": Topic("heads that are split or joined across tokens, as by a view without a transpose", alone=True),
    "rotations": Topic("queries or keys that alone are rotated by positions", alone=True),
    "probabilities": Topic("a factor of the probabilities after softmax", alone=True),
    "dead": Topic("a matrix that reads zeros, or zeros through which no gradient passes", alone=True),
    "mask": Topic("tokens that see later ones, or do not, unlike what is declared"),
    "items": Topic("an item of the batch that depends on another one", alone=True),
    "axes": Topic("positions that are added along another axis than that of tokens which see each other", alone=True),
    "unused": Topic(
        "a parameter of a layer that no output follows from, or some outputs of a matrix", alone=True, of_code=True
    ),
    "unregistered": Topic("a tensor that trains and is no parameter of the model", alone=True),
    "roles": Topic("roles or layers that another model does not have"),
    "stream": Topic("a factor or a norm of the stream that is not declared", one_clause=True, of_code=True),
    "logits": Topic("another factor of logits", one_clause=True, of_code=True),
    "factor": Topic("another factor of a branch", one_clause=True, of_code=True),
    "reading": Topic("another factor of what a matrix reads", one_clause=True, of_code=True),
    "unlike": Topic("one layer unlike the others of its role", alone=True, of_code=True),
    "σ": Topic("another standard deviation"),
    "bias": Topic("another standard deviation, or another value, of a bias", one_clause=True),
    "value": Topic("other values than those declared", one_clause=True),
    "law": Topic("another mean or another law of entries", one_clause=True),
    "outputs": Topic("other outputs than those of another model with the same weights"),
    "untested": Topic("a declaration that was not tested"),
    "code": Topic("nothing: the code of a model's library does so"),
    "first axis": Topic("nothing: tokens that see each other along the first axis", note=True),
    "random": Topic("nothing: random numbers that are drawn", note=True),
    "zeros": Topic("nothing: matrices that start from 0", note=True),
    "left": Topic("nothing: parameters outside of layers without use", note=True),
}
"""All topics, causes before consequences."""

FAILS = {name: topic.fails for name, topic in TOPICS.items() if topic.alone}
"""Findings that fail an audit without a recipe; `allow=` takes each off."""
