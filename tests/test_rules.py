"""Every sharding rule, proved: the op run on shards through the real passes equals the whole op, for every factor and split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_op import OneOp, assert_same, assignment_of, legal_cuts, one_op, run_whole
from rule_cases import CASES, Case

from autopar import rules, rules_compute, rules_view  # noqa: F401  (the latter two fill the table)
from autopar.mesh import Mesh


def built(case: Case) -> OneOp:
    args, kwargs = case.arguments()
    return one_op(case.op, args, kwargs, case.stand_in)


def test_every_derived_rule_has_a_case() -> None:
    assert set(rules._DERIVERS) - {case.op for case in CASES} == set()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cut_op_equals_the_whole(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    never_cut = {f for f in op.rule.factors if f not in op.rule.whole and op.rule.sizes[f] > 1}
    assert bool(never_cut) == case.cut
    for num_ranks in (2, 3):
        mesh = Mesh(("tp",), (num_ranks,))
        for cut in legal_cuts(op.rule, num_ranks):
            found, _ = run_whole(op, mesh, assignment_of(op, mesh, [cut]))
            for i, (value, expected) in enumerate(zip(found, op.expected, strict=True)):
                if case.values:
                    assert_same(value, expected, f"output {i}, {cut} over {num_ranks}")
            never_cut.discard(cut.factor)
    assert not never_cut, "this case's sizes leave factors uncut"
