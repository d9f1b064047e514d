"""Every sharding rule, proved: the op run on shards through the real passes equals the whole op, for every factor and split."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import OneOp, assert_same, assignment_of, legal_cuts, one_op, run_whole
from rule_cases import CASES, Case, case, f

from autopar import rules, rules_compute, rules_view  # noqa: F401  (the latter two fill the table)
from autopar.errors import RuleError
from autopar.mesh import Mesh
from autopar.passes.propagate import Cut
from autopar.rules import OpRule, parse_rule, register_sharding_rule, rule_for

aten = torch.ops.aten
GRID = Mesh(("dp", "tp"), (2, 2))
OBLONG = Mesh(("dp", "tp"), (2, 3))
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


def row(num_ranks: int) -> Mesh:
    return Mesh(("tp",), (num_ranks,))


def built(case: Case) -> OneOp:
    args, kwargs = case.arguments()
    return one_op(case.op, args, kwargs, case.stand_in)


def check_cut(op: OneOp, mesh: Mesh, cuts: list[Cut | None], values: bool = True) -> None:
    found, _ = run_whole(op, mesh, assignment_of(op, mesh, cuts))
    for i, (value, expected) in enumerate(zip(found, op.expected, strict=True)):
        if values:
            assert_same(value, expected, f"output {i} of {op.call.target}, {cuts} on {mesh}")


def check_every_cut(op: OneOp, values: bool = True) -> set[str]:
    """Run every cut over two and three ranks; returns the factors that were cut."""
    assert op.rule is not None
    done = set()
    for num_ranks in (2, 3):
        for cut in legal_cuts(op.rule, num_ranks):
            check_cut(op, row(num_ranks), [cut], values)
            done.add(cut.factor)
    return done


def free_factors(rule: OpRule) -> set[str]:
    return {name for name in rule.factors if name not in rule.whole and rule.sizes[name] > 1}


# ---- each op, each factor


def test_every_derived_rule_has_a_case() -> None:
    assert set(rules._DERIVERS) - {case.op for case in CASES} == set()


@EVERY_CASE
def test_cut_op_equals_the_whole(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    assert bool(free_factors(op.rule)) == case.cut
    assert check_every_cut(op, case.values) == free_factors(op.rule), "this case's sizes leave a factor uncut"


def nested_pairs(rule: OpRule, mesh: Mesh) -> list[list[Cut | None]]:
    """Pairs of cuts along both axes: of two factors, of one factor twice, of its outer and its inner part."""
    outer, inner = (list(legal_cuts(rule, n)) for n in mesh.sizes)
    pairs = []
    for a, b in itertools.product(outer, inner):
        if a.factor != b.factor:
            fits = a.split == b.split == 1
        elif a.split == b.split:
            fits = rule.sizes[a.factor] % (a.split * mesh.num_ranks) == 0
        else:
            first, second, num_parts = (a, b, mesh.sizes[0]) if a.split < b.split else (b, a, mesh.sizes[1])
            fits = second.split % (first.split * num_parts) == 0
        if fits:
            pairs.append([a, b])
    return pairs


@EVERY_CASE
def test_op_cut_along_two_axes_equals_the_whole(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    for mesh in (GRID, OBLONG):
        for cuts in nested_pairs(op.rule, mesh):
            check_cut(op, mesh, cuts, case.values)


@EVERY_CASE
def test_unreduced_sums_pass_through_exactly_the_linear_inputs(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    for num_ranks, linear in itertools.product((2, 3), op.rule.linear):
        mesh = row(num_ranks)
        if any(op.tensors[i].dtype is torch.bool for i in linear):
            continue  # booleans are never sums
        found, graph = run_whole(op, mesh, assignment_of(op, mesh, [None], linear))
        assert not any("c10d" in str(n.target) for n in graph.module.graph.nodes)
        for i, (value, expected) in enumerate(zip(found, op.expected, strict=True)):
            assert_same(value, expected, f"output {i}, partial in {set(linear)}")


@pytest.mark.parametrize(
    ("wrong", "cut"),
    [
        (case(aten._softmax.default, f(4, 6), -1, False), "d1"),
        (case(aten.addmm.default, f(3), f(4, 6), f(6, 3)), "k"),
        (case(aten.slice.Tensor, f(12, 3), 0, 2, 8), "c"),
        (case(aten.cumsum.default, f(6, 4), 0), "d0"),
    ],
    ids=str,
)
def test_a_factor_that_must_stay_whole_is_told_from_one_that_need_not(wrong: Case, cut: str) -> None:
    op = built(wrong)
    assert op.rule is not None
    assert cut in op.rule.whole
    op.rule = replace(op.rule, whole=frozenset())
    with pytest.raises((AssertionError, RuntimeError, ArithmeticError)):
        check_cut(op, row(2), [Cut(cut, 1)])


def test_an_input_that_is_not_linear_is_told() -> None:
    op = built(case(aten.add.Tensor, f(4, 2), f(4, 2)))
    mesh = row(2)
    found, _ = run_whole(op, mesh, assignment_of(op, mesh, [None], frozenset({0})))
    with pytest.raises(AssertionError):
        assert_same(found[0], op.expected[0], "a constant is added by every rank")


# ---- random shapes

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7]), min_size=0, max_size=4)
RUNS = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def ones_like_shape(shape: list[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1


@st.composite
def factorisations(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes that group the same atoms differently, or the atoms in another order."""
    atoms = draw(st.lists(st.sampled_from([2, 2, 3, 4, 5]), min_size=1, max_size=4))

    def grouped(order: list[int]) -> list[int]:
        ends = sorted(draw(st.sets(st.integers(1, len(order)), max_size=3)) | {len(order)})
        shape = [math.prod(order[a:b]) for a, b in itertools.pairwise([0, *ends])]
        for _ in range(draw(st.integers(0, 2))):
            shape.insert(draw(st.integers(0, len(shape))), 1)
        return shape

    return grouped(atoms), grouped(draw(st.permutations(atoms)))


@RUNS
@given(factorisations())
def test_random_views(shapes: tuple[list[int], list[int]]) -> None:
    source, target = shapes
    op = one_op(aten.view.default, [ones_like_shape(source), target], {})
    assert op.rule is not None
    for dims, shape in ((op.rule.inputs[0], source), (op.rule.outputs[0], target)):
        assert [math.prod(op.rule.sizes[name] for name in group) for group in dims] == shape
    check_every_cut(op)


@RUNS
@given(st.permutations([2, 3, 4]), st.permutations([2, 3, 4]))
def test_dims_that_do_not_divide_one_another_stay_whole_together(source: list[int], target: list[int]) -> None:
    left, right, whole = rules_view.match_view(source, target)
    free = [[name for group in dims for name in group if name not in whole] for dims in (left, right)]
    assert free[0] == free[1], "what may be cut comes in the same order on both sides"
    agreed = len([0 for a, b in zip(source, target, strict=True) if a == b])
    assert len(free[0]) >= agreed if source == target else True


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """A shape, a dim, and sizes of consecutive parts of the dim: aligned on a grain, or not."""
    shape = draw(st.lists(st.sampled_from([2, 3, 6]), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    grain = draw(st.sampled_from([1, 2, 3, 6]))
    parts = [grain * n for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))]
    shape[dim] = max(1, sum(parts))
    return shape, dim, parts if sum(parts) else [0, 1]


@RUNS
@given(ranges(), st.booleans())
def test_random_splits_slices_and_joins(cut: tuple[list[int], int, list[int]], from_the_end: bool) -> None:
    shape, dim, parts = cut
    x = ones_like_shape(shape)
    signed = dim - len(shape) if from_the_end else dim
    check_every_cut(one_op(aten.split_with_sizes.default, [x, parts, signed], {}))
    check_every_cut(one_op(aten.cat.default, [list(x.split(parts, dim)), signed], {}))
    start, end = parts[0], sum(parts[:2])
    if from_the_end:
        start, end = start - shape[dim], end - shape[dim] or 2**63 - 1
    op = one_op(aten.slice.Tensor, [x, signed, start, end], {})
    check_every_cut(op)
    check_every_cut(one_op(aten.slice_backward.default, [op.expected[0], shape, signed, start, end, 1], {}))


@st.composite
def broadcasting(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 6]), min_size=1, max_size=4))

    def narrowed() -> list[int]:
        kept = [size if draw(st.booleans()) else 1 for size in shape]
        return kept[draw(st.integers(0, len(shape))) :]

    return shape, [narrowed(), narrowed()]


@RUNS
@given(broadcasting())
def test_random_broadcasting(shapes: tuple[list[int], list[list[int]]]) -> None:
    full, (left, right) = shapes
    x, a, b = (ones_like_shape(s) for s in (full, left, right))
    for op, args in [
        (aten.mul.Tensor, [x, a]), (aten.addcmul.default, [x, a, b]), (aten.atan2.default, [a, b]),
        (aten.where.self, [a > 3, b, x]), (aten.lerp.Tensor, [a, x, b]),
    ]:  # fmt: skip
        check_every_cut(one_op(op, args, {}))


@RUNS
@given(SIZES, st.data())
def test_random_expands_and_reductions(shape: list[int], data: st.DataObject) -> None:
    source = [size if data.draw(st.booleans()) else 1 for size in shape]
    check_every_cut(one_op(aten.expand.default, [ones_like_shape(source), [2, *shape]], {}))
    dims = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda d: d % len(shape))) if shape else []
    x = ones_like_shape(shape).sin()
    for reduction in (aten.sum.dim_IntList, aten.amax.default, aten.amin.default):
        check_every_cut(one_op(reduction, [x, dims, data.draw(st.booleans())], {}))


# ---- every op that PyTorch calls pointwise


def pointwise_overloads() -> list[Any]:
    packets = [getattr(aten, name) for name in dir(aten)]
    overloads = [getattr(p, n) for p in packets if isinstance(p, torch._ops.OpOverloadPacket) for n in p.overloads()]
    return [op for op in overloads if torch.Tag.pointwise in op.tags and not op._schema.is_mutable]


def sample_arguments(op: Any, integers: bool) -> tuple[list[Any], dict[str, Any]]:
    """Tensors that broadcast against one another, and plain numbers, by the op's schema."""
    shapes = itertools.cycle([(6, 4), (6, 1), (4,)])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" or kind == "Optional[Tensor]":
            shape = next(shapes)
            steps = torch.arange(math.prod(shape)).reshape(shape) % 5 + 1
            value: Any = steps if integers else steps.double() / 7
        elif argument.has_default_value():
            continue
        else:
            value = {"str": "floor", "List[float]": [0.5]}.get(kind, 2 if kind in ("int", "number") else True if kind == "bool" else 0.5)
        if argument.kwarg_only:
            kwargs[argument.name] = "floor" if argument.name == "rounding_mode" else value
        else:
            args.append(value)
    return args, kwargs


@pytest.mark.parametrize("op", pointwise_overloads(), ids=str)
def test_pointwise_ops_are_pointwise(op: Any) -> None:
    names = ("bitwise", "shift", "gcd", "lcm", "xor")
    args, kwargs = sample_arguments(op, any(name in str(op) for name in names))
    one = one_op(op, args, kwargs)
    assert one.rule is not None
    assert check_every_cut(one) == {"d0", "d1"}
