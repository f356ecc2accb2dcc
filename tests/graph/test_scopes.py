"""Scopes of variables: names, what is shared in them, and what initializers determine."""

import numpy as np
import pytest

from ndistribute import graph as g


def test_variables_are_shared_in_scopes_that_reuse_them() -> None:
    with g.Graph().as_default(), g.variable_scope("a"):
        with g.variable_scope("b") as scope:
            w = g.get_variable("w", [2])
            with pytest.raises(ValueError, match="'a/b/w' exists already"):
                g.get_variable("w", [2])
            scope.reuse_variables()
            assert g.get_variable("w", [2]) is w
        with g.variable_scope(scope):
            assert g.get_variable("w") is w
            with pytest.raises(ValueError, match="'a/b/v' does not exist"):
                g.get_variable("v", [2])
        assert g.get_variable("v", [2]).name == "a/v:0"
        with g.Graph().as_default():
            assert g.get_variable("v", [2]).name == "v:0"


def test_new_variables_are_like_their_initializers() -> None:
    with g.Graph().as_default() as graph, g.Session() as session:
        counted = g.get_variable("counted", initializer=np.int64(3))
        number = g.get_variable("number", [2], np.int32, regularizer=lambda v: np.sum(v + 1))
        limited = g.get_variable("limited", [600])
        with pytest.raises(ValueError, match=r"'wrong' has shape \(2,\), not \(3,\)"):
            g.get_variable("wrong", [3], initializer=np.zeros(2))
        names = []
        for _ in range(2):
            with g.variable_scope(None, "layer", [limited]):
                names.append(g.get_variable("w", []).name)
        session.run(g.global_variables_initializer())
        assert (counted.dtype, session.run(number).tolist()) == (np.int64, [0, 0])
        assert session.run(graph.get_collection("regularization_losses")) == [2]
        assert 0.06 < np.abs(session.run(limited)).max() < np.sqrt(6 / 1200)
    assert names == ["layer/w:0", "layer_1/w:0"]
