"""Every sharding rule, proved: the op run on shards through the real passes equals the whole op, for every factor and
split."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import OneOp, assert_same, assignment_of, legal_cuts, one_op, run_whole, uneven_cuts
from rule_cases import CASES as GENERAL
from rule_cases import Case, case, f
from rule_cases_batched import BATCHED
from rule_cases_image import IMAGES
from rule_cases_scatter import SCATTERS

from autopar import rules, rules_attention, rules_batched, rules_compute, rules_image, rules_scatter, rules_view  # noqa: F401
from autopar._compat import OpOverloadPacket
from autopar.errors import RuleError
from autopar.mesh import Mesh
from autopar.passes.propagate import Cut
from autopar.rules import Call, OpRule, build, parse_rule, register_sharding_rule, rule_for, tensor_inputs

aten = torch.ops.aten
GRID = Mesh(("dp", "tp"), (2, 2))
OBLONG = Mesh(("dp", "tp"), (2, 3))
CASES = [*GENERAL, *BATCHED, *IMAGES, *SCATTERS]
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


def test_a_rule_for_an_argument_that_the_op_has_not_is_refused() -> None:
    """Else the argument of another PyTorch's name for it would be taken as whole."""
    call = Call(built(next(case for case in CASES if case.op is aten.mm.default)).call)
    with pytest.raises(RuleError, match="has no argument 'left'; it has self, mat2"):
        build(call, {"left": (("m",), ("k",)), "mat2": (("k",), ("n",))}, [(("m",), ("n",))])


@EVERY_CASE
def test_factors_that_stay_whole_are_the_rules_own(case: Case) -> None:
    rule = built(case).rule
    assert rule is None or rule.whole <= set(rule.sizes)


@EVERY_CASE
def test_cut_op_equals_the_whole(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    assert bool(free_factors(op.rule)) == case.cut
    assert check_every_cut(op, case.values) == free_factors(op.rule), "this case's sizes leave a factor uncut"


@EVERY_CASE
def test_op_cut_unevenly_equals_the_whole(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    for num_ranks in (4, 5):  # of 6 and 12 positions the last rank has fewer, or none
        for cut in uneven_cuts(op.rule, num_ranks):
            check_cut(op, row(num_ranks), [cut], case.values)


def nested_pairs(rule: OpRule, mesh: Mesh) -> list[tuple[Cut, Cut]]:
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
            pairs.append((a, b))
    return pairs


@EVERY_CASE
def test_op_cut_along_two_axes_equals_the_whole(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    for mesh, same in ((GRID, True), (OBLONG, False)):  # a factor cut twice needs a size with both
        for a, b in nested_pairs(op.rule, mesh):
            if (a.factor == b.factor) is same:
                check_cut(op, mesh, [a, b], case.values)


@EVERY_CASE
def test_unreduced_sums_pass_through_exactly_the_linear_inputs(case: Case) -> None:
    op = built(case)
    assert op.rule is not None
    for num_ranks, linear in itertools.product((2, 3), op.rule.linear):
        mesh = row(num_ranks)
        if any(tensor_inputs(op.call)[i].meta["val"].dtype is torch.bool for i in linear):
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
RUNS = settings(max_examples=30, deadline=None, derandomize=True, database=None)


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


@pytest.mark.parametrize(
    ("source", "target", "free", "whole"),
    [
        ([24], [4, 6], [("v0", "v1")], []),
        ([4, 6], [8, 3], [("v0",), ("v1", "v2")], []),
        ([5, 6, 4, 7], [5, 8, 3, 7], [("v0",), (), (), ("v2",)], ["v1l1", "v1l2", "v1r1", "v1r2"]),
        ([2, 1, 3], [1, 2, 3, 1], [("v0",), (), ("v1",)], []),
    ],
    ids=str,
)
def test_dimension_maps(source: list[int], target: list[int], free: list[tuple[str, ...]], whole: list[str]) -> None:
    left, _, kept = rules_view.match_view(source, target)
    assert [tuple(name for name in group if name not in kept) for group in left] == free
    assert sorted(kept) == whole


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
    dims = (
        data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda d: d % len(shape)))
        if shape
        else []
    )
    x = ones_like_shape(shape).sin()
    for reduction in (aten.sum.dim_IntList, aten.amax.default, aten.amin.default):
        check_every_cut(one_op(reduction, [x, dims, data.draw(st.booleans())], {}))


# ---- written rules


def test_parse_rule() -> None:
    inputs, outputs, whole = parse_rule("b s^ (h d), 1 d, ... k -> b s h, ... 1")
    assert inputs == [[("b",), ("s",), ("h", "d")], [(), ("d",)], [("...",), ("k",)]]
    assert outputs == [[("b",), ("s",), ("h",)], [("...",), ()]]
    assert whole == {"s"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", r"cannot read rule 'm k, k n': write inputs -> outputs, such as \"m k, k n -> m n\""),
        ("-> m n", "write inputs -> outputs"),
        ("m k ->", "write inputs -> outputs"),
        ("m-k -> m", r"cannot read rule 'm-k -> m': unexpected '-' in term 'm-k'"),
        ("m (k -> m", r"unexpected '\(' in term 'm \(k'"),
        ("m m -> m", "a factor occurs twice in the term 'm m'"),
        ("m 2 -> m", "unexpected '2' in term 'm 2'"),
    ],
)
def test_rules_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_rule(text)


@torch.library.custom_op("autopar_tests::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).flip(-1)


@torch.library.custom_op("autopar_tests::norms", mutates_args=())
def norms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.amax(-1), x.sum(-1)


@torch.library.custom_op("autopar_tests::grouped_dot", mutates_args=())
def grouped_dot(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.unflatten(-1, (-1, len(weight))) * weight).sum((-1, -2))


OURS = torch.ops.autopar_tests


@pytest.fixture(autouse=True)
def _forget_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_USER_RULES", {})


@pytest.mark.parametrize("name", ["autopar_tests::scale_rows", "autopar_tests::scale_rows.default"])
def test_registered_rule(name: str) -> None:
    call = case(OURS.scale_rows.default, f(6, 3, 4), f(4))
    assert built(call).rule is None
    register_sharding_rule(name, "... h^, h -> ... h", linear=[[0], [1]])
    op = built(call)
    assert check_every_cut(op) == {"_0", "_1"}
    mesh = row(2)
    found, _ = run_whole(op, mesh, assignment_of(op, mesh, [None], frozenset({0})))
    assert_same(found[0], op.expected[0], "linear")


def test_registered_rule_with_a_maximum() -> None:
    # One factor combines in one way, so an op with two results that need two is two ops.
    register_sharding_rule("autopar_tests::norms", "m n^ -> m, m")
    assert check_every_cut(built(case(OURS.norms.default, f(6, 4)))) == {"m"}
    register_sharding_rule("aten::amax", "m n -> m", reduce={"n": "max"})
    assert check_every_cut(built(case(aten.amax.default, f(6, 4), [1]))) == {"m", "n"}


def test_sizes_follow_from_any_term() -> None:
    register_sharding_rule("autopar_tests::grouped_dot", "m (g h), h -> m")
    assert check_every_cut(built(case(OURS.grouped_dot.default, f(6, 12), f(4)))) == {"m", "g", "h"}


def test_registered_rule_takes_precedence() -> None:
    register_sharding_rule("aten::mm", "m k^, k n^ -> m n")
    assert check_every_cut(built(case(aten.mm.default, f(6, 4), f(4, 6)))) == {"m"}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("b s h -> b s h", r"has 1 inputs and 1 outputs; the call has 2 tensors and 1 outputs"),
        ("b s h, h -> b s h, b", r"has 2 inputs and 2 outputs; the call has 2 tensors and 1 outputs"),
        (
            "b h, h -> b h",
            r"rule of autopar_tests.scale_rows.default: a term has 2 dims, but the tensor's shape is \[6, 3, 4\]",
        ),
        ("b s h, s -> b s h", r"dim s should have size 4 in \[4\], the factors give 3"),
        ("b s h, (x y) -> b s h", r"the size of factor 'x' does not follow from the shapes"),
        ("b s h^, h^ -> b s k", None),
    ],
)
def test_rules_that_do_not_fit_the_call(rule: str, message: str | None) -> None:
    register_sharding_rule("autopar_tests::scale_rows", rule)
    call = case(OURS.scale_rows.default, f(6, 3, 4), f(4))
    if message is None:  # an output may have a factor of its own, which then stays whole
        assert check_every_cut(built(call)) == {"b", "s"}
        return
    with pytest.raises(RuleError, match=message):
        built(call)


@pytest.mark.parametrize(
    ("op", "rule", "reduce", "message"),
    [
        ("scale_rows", "m -> m", None, r'op name \'scale_rows\' is not of the form "library::op"'),
        ("a::b.c.d", "m -> m", None, "is not of the form"),
        (
            "a::b",
            "m n -> m",
            {"n": "mean"},
            r"rule of a::b: partial results combine by sum, max or min, not \{'n': 'mean'\}",
        ),
        ("a::b", "m n", None, "cannot read rule 'm n'"),
        (None, "m -> m", None, "op name None is not of the form"),
        (torch.ops.aten.relu, "m -> m", None, "is not of the form"),
        ("aten::relu", None, None, "rule of aten::relu: write it as text, .* not None"),
        (
            "aten::amax",
            "m n -> m",
            {"k": "max"},
            "rule of aten::amax: reduce names k, which no input of 'm n -> m' has",
        ),
        ("aten::rellu", "m -> m", None, "there is no op aten::rellu: import the library that defines it first"),
        ("aten::mm.mode", "m k, k n -> m n", None, "there is no op aten::mm.mode"),
        ("no_such_library::mm", "m k, k n -> m n", None, "there is no op no_such_library::mm"),
    ],
)
def test_rules_that_cannot_be_registered(op: str, rule: str, reduce: dict[str, str] | None, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        register_sharding_rule(op, rule, reduce=reduce)


def test_a_linear_argument_must_exist() -> None:
    with pytest.raises(RuleError, match=r"linear names argument 2, but 'm k, k n -> m n' has 2 \(from 0\)"):
        register_sharding_rule("aten::mm", "m k, k n -> m n", linear=[[0], [2]])


def test_an_op_without_a_rule_has_none() -> None:
    assert rule_for(built(case(aten.histc.default, f(4, 6))).call) is None


# ---- every op that PyTorch calls pointwise


def pointwise_overloads() -> list[Any]:
    packets = [getattr(aten, name) for name in dir(aten)]
    overloads = [getattr(p, n) for p in packets if isinstance(p, OpOverloadPacket) for n in p.overloads()]
    found = [op for op in overloads if torch.Tag.pointwise in op.tags and not op._schema.is_mutable]
    return [op for op in found if op is not aten.equal.default]  # which returns one bool


def sample_arguments(op: Any, integers: bool) -> tuple[list[Any], dict[str, Any]]:
    """Tensors that broadcast against one another, and plain numbers, by the op's schema."""
    shapes = itertools.cycle([(6, 4), (6, 1), (4,)])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            shape = next(shapes)
            steps = torch.arange(math.prod(shape)).reshape(shape) % 5 + 1
            value: Any = steps if integers else steps.double() / 7
            value = steps > 2 if argument.name in ("condition", "mask") else value
        elif argument.has_default_value() and argument.name not in ("min", "max"):
            continue
        else:
            value = True if kind == "bool" else "floor" if argument.name == "rounding_mode" else 2
        if argument.kwarg_only:
            kwargs[argument.name] = value
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
