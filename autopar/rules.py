"""Sharding rules: which dims of an op's inputs and outputs are the same factor, as in an einsum.

A rule for `mm` reads `"m k, k n -> m n"`.  A factor that inputs and outputs share may be cut along a mesh axis and
every rank computes its part.  A factor that only inputs have may be cut too; the output is then `Partial`.  Factors
marked
whole (a softmax's axis) are never cut.  Written rules use this grammar, one term per tensor:

    term  := dim*            dims separated by blanks
    dim   := factor | factor^ | (factor factor …) | 1 | …
    ^     the factor must stay whole
    (a b) a dim that fuses factors, the outermost first
    1     a dim of size one that carries no factor
    ...   any number of leading dims, the same in every term

Rules are kept per op overload.  Most ops need no written rule: `rules_view` and `rules_compute` derive theirs from
shapes
and arguments, and pointwise ops are recognised by PyTorch's `pointwise` tag.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload, OpOverloadPacket, map_nodes
from autopar.errors import RuleError

Dims = tuple[tuple[str, ...], ...]
"""For each dim of a tensor, the factors that it fuses, outermost first; `()` for a dim that carries none."""


@dataclass(frozen=True)
class RowsOfGroups:
    """A factor of rows that lie in groups one after another.

    Attributes:
        ends: the factor of the groups in what says where they end, which an op reads whole.
        groups: the factor of the groups in what has something for each, cut with the rows; empty if nothing has.
    """

    ends: str
    groups: str = ""


@dataclass(frozen=True)
class OpRule:
    """A rule bound to one call.

    Attributes:
        inputs: dims of each tensor argument, in the order of `tensor_inputs`.
        outputs: dims of each output.
        sizes: size of every factor.
        whole: factors that must not be cut.
        reduce: how the shards of a factor that only inputs have combine, where it is not `sum`.
        linear: sets of inputs in which the op is linear while the others are fixed; if exactly those inputs are
            `Partial(sum)`, so is the output.
        lookup: factor -> position of the integer input that indexes it.  Cut such a factor and each rank looks up only
        what it
            holds; the rewrite shifts and masks the indices.
        groups: factor -> position of the integer input that says where groups of its positions end.  Cut it and the
            rewrite shifts the ends to each rank's own positions.
        rows: factor -> its groups.  It is never cut in equal parts; but each rank may have the rows of its own groups.
        even: factors that must not be cut into parts of different sizes, since the op counts positions or parts, or
            would fail on padding (as an index, or in a division).
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduce: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    lookup: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, RowsOfGroups] = field(default_factory=dict)
    even: frozenset[str] = frozenset()

    def may_be_uneven(self, factor: str, split: int, grain: int) -> bool:
        """Whether `factor`, read as (split, n, grain), may be cut along n where the ranks do not divide n.

        A lookup's positions are counted from one end, so there n must be all of a dim.
        """
        if factor in self.even or factor in self.groups:
            return False
        groups = [group for dims in (*self.inputs, *self.outputs) for group in dims if factor in group]
        return factor not in self.lookup or (split == grain == 1 and all(group == (factor,) for group in groups))

    def inside(self, factor: str, dims: Dims) -> int:
        """The product of the factors inside `factor` in the dim of a tensor that has it; 1 if none has."""
        group = next((group for group in dims if factor in group), (factor,))
        return math.prod(self.sizes[f] for f in group[group.index(factor) + 1 :])

    def blocks_of(self, rows: str) -> str:
        """The factor of the blocks that rows in groups lie in, which is outside of theirs."""
        return next(group[0] for dims in (*self.inputs, *self.outputs) for group in dims if rows in group)

    def may_part_rows(self, factor: str) -> bool:
        """Whether the op may run on rows of any number and order: the innermost part of their dims that `factor` is,
        which another op has made so.

        It then makes each row by itself, or sums over them all; of no rows it can do both.
        """
        if factor in self.rows:
            return True
        given, made = ([g for dims in terms for g in dims if factor in g] for terms in (self.inputs, self.outputs))
        is_free = factor not in self.whole and not self.is_range(factor)
        is_sum = bool(made) or self.reduce.get(factor, "sum") == "sum"
        return is_free and is_sum and bool(given) and all(group[-1] == factor for group in (*given, *made))

    def is_range(self, factor: str) -> bool:
        """Whether a rank must hold consecutive positions of `factor`, as integers count them."""
        return factor in self.lookup or factor in self.groups

    def occurrences(self, factor: str, dims: Dims) -> tuple[int, int] | None:
        """Where `factor` lies in a tensor: its dim, and the product of the factors outside it in that dim."""
        for dim, factors in enumerate(dims):
            if factor in factors:
                outer = math.prod(self.sizes[f] for f in factors[: factors.index(factor)])
                return dim, outer
        return None

    @cached_property
    def together(self) -> frozenset[tuple[str, str]]:
        """Pairs of factors that are parts of one dim of some operand or result, each with itself, too."""
        groups = [group for dims in (*self.inputs, *self.outputs) for group in dims]
        return frozenset((one, other) for group in groups for one in group for other in group)

    @cached_property
    def known(self) -> dict[Hashable, Any]:
        """What was worked out of this rule and something else, by the latter: plans that are compared cut most calls
        alike."""
        return {}

    @cached_property
    def contracts(self) -> bool:
        """Whether the op sums over a factor that two of its inputs have, as products do."""
        names = [{name for group in dims for name in group} for dims in self.inputs]
        results = {name for dims in self.outputs for group in dims for name in group}
        return any((a & b) - results for a, b in itertools.combinations(names, 2))

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """All factors, those of outputs first, each once."""
        seen: dict[str, None] = {}
        for dims in (*self.outputs, *self.inputs):
            for group in dims:
                seen.update(dict.fromkeys(group))
        return tuple(seen)


class Call:
    """One node seen as a call: its arguments by schema name and the traced values of its tensors."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.op: Any = node.target
        self._given = [*zip(argument_names(self.op), node.args, strict=False), *node.kwargs.items()]
        self.args: dict[str, Any] = {**_defaults(self.op), **dict(self._given)}
        value = node.meta["val"]
        self.outputs: list[torch.Tensor | None] = list(value) if isinstance(value, (tuple, list)) else [value]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @cached_property
    def named(self) -> list[tuple[str, fx.Node]]:
        """The tensor arguments in order, each with its argument's name."""
        return [(name, node) for name, value in self._given for node in _tensor_nodes(value)]

    def own(self, inputs: Mapping[str, Dims | list[Dims]]) -> dict[str, Dims | list[Dims]]:
        """Of what a rule for several ops says of arguments, what is of this op's."""
        return {name: dims for name, dims in inputs.items() if name in argument_names(self.op)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of the tensor argument `name`."""
        return tuple(self.args[name].meta["val"].shape)

    def dim(self, name: str, rank: int) -> int:
        """The argument `name` as a non-negative dim of a tensor with `rank` dims."""
        return int(self.args[name]) % max(rank, 1)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Global shape of the first output."""
        assert self.outputs[0] is not None
        return tuple(self.outputs[0].shape)


def is_tensor_node(value: object) -> bool:
    """Whether `value` is a node that holds one tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node, in order, repeated ones repeated."""
    return _tensor_nodes((node.args, node.kwargs))


def _tensor_nodes(arg: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_nodes(arg, found.append)
    return [node for node in found if isinstance(node.meta.get("val"), torch.Tensor)]


@cache
def argument_names(op: Any) -> tuple[str, ...]:
    """Names of an op's arguments, in the order of its schema, which PyTorch builds anew each time it is asked."""
    return tuple(arg.name for arg in op._schema.arguments)


@cache
def _defaults(op: Any) -> dict[str, Any]:
    return {arg.name: arg.default_value if arg.has_default_value() else None for arg in op._schema.arguments}


def is_look(node: fx.Node) -> bool:
    """Whether a call only looks at its one input: it gives a view of it, or something that is as good as one."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, OpOverload):
        return False
    return bool(op.is_view or op is torch.ops.aten._unsafe_view.default) and len(tensor_inputs(node)) == 1


def is_look_or_cast(node: fx.Node) -> bool:
    """Whether a call gives its one input in another shape, order or dtype: what a parameter may go through before the
    op that uses it."""
    return node.target is torch.ops.aten._to_copy.default or is_look(node)


Deriver = Callable[[Call], OpRule]
_DERIVERS: dict[Any, Deriver] = {}
_USER_RULES: dict[str, tuple[str, Deriver]] = {}
"""By op: what was registered, in words, and what derives the rule from a call."""


def derives(*ops: Any) -> Callable[[Deriver], Deriver]:
    """Decorator: the function derives the rule of these ops (packets: every overload without side effects) from a
    call."""

    def keep(function: Deriver) -> Deriver:
        for op in ops:
            _DERIVERS.update((overload, function) for overload in overloads_of(op) if not overload._schema.is_mutable)
        return function

    return keep


def overloads_of(op: Any) -> list[Any]:
    """The overloads of a packet such as `aten.sum`; an overload is its own."""
    if not isinstance(op, OpOverloadPacket):
        return [op]
    return [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]


def rule_for(node: fx.Node) -> OpRule | None:
    """The rule of a call, or None if the op has none and must run whole on every rank."""
    deriver = _deriver(node.target)
    is_tensor = isinstance(node.meta["val"], (torch.Tensor, tuple, list))
    return deriver(Call(node)) if deriver and is_tensor else None


def has_rule(op: object) -> bool:
    """Whether calls of an op have a rule."""
    return _deriver(op) is not None


def _deriver(op: object) -> Deriver | None:
    from autopar import (  # noqa: F401  (each fills the table)
        grouped,
        rules_attention,
        rules_batched,
        rules_compute,
        rules_image,
        rules_scatter,
        rules_view,
        sorted_rows,
    )

    if not isinstance(op, OpOverload):
        return None
    name = op.name().removesuffix(".default")  # type: ignore[no-untyped-call]
    deriver = _USER_RULES[name][1] if name in _USER_RULES else _DERIVERS.get(op)
    return deriver or (rules_compute.pointwise if torch.Tag.pointwise in op.tags else None)


def build(
    call: Call,
    inputs: Mapping[str, Dims | list[Dims]] | Mapping[str, list[Dims]],
    outputs: Sequence[Dims],
    *,
    known: Mapping[str, int] | None = None,
    whole: Iterable[str] = (),
    reduce: Mapping[str, str] | None = None,
    linear: Iterable[Iterable[str]] = (),
    lookup: Mapping[str, str] | None = None,
    groups: Mapping[str, str] | None = None,
    rows: Mapping[str, RowsOfGroups] | None = None,
    even: Iterable[str] = (),
) -> OpRule:
    """Bind a rule to a call: dims are given per argument *name* (a list of them for a list of tensors), and checked
    against the real shapes.  An argument that is left out is taken as whole; `known` gives sizes of factors that
    do not follow from the shapes.  Names in `whole` that no term has are left out.

    Raises:
        RuleError: if a term has another number of dims than the tensor, a factor two sizes, or the op no argument of a
            name: to take that argument as whole would be wrong.
    """
    if unknown := [name for name in inputs if name not in argument_names(call.op)]:
        raise RuleError(f"{call.op} has no argument {unknown[0]!r}; it has {', '.join(argument_names(call.op))}")
    pending = {name: list(dims) if isinstance(dims, list) else [dims] for name, dims in inputs.items()}
    bound: list[Dims] = []
    positions: dict[str, list[int]] = {}
    for name, node in call.named:
        dims = pending[name].pop(0) if pending.get(name) else tuple(() for _ in node.meta["val"].shape)
        positions.setdefault(name, []).append(len(bound))
        bound.append(dims)
    sizes: dict[str, int] = dict(known or {})
    shapes = [tuple(node.meta["val"].shape) for _, node in call.named]
    out_shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in call.outputs]
    num_known = -1
    while num_known < len(sizes):  # one term's sizes may settle another's
        num_known = len(sizes)
        for dims, shape in zip((*bound, *outputs), (*shapes, *out_shapes), strict=True):
            if shape is not None:
                _solve_sizes(call, dims, shape, sizes)
    _check_sizes(call, (*bound, *outputs), (*shapes, *out_shapes), sizes)
    return OpRule(
        tuple(bound),
        tuple(outputs),
        sizes,
        frozenset(name for name in whole if name in sizes),
        dict(reduce or {}),
        tuple(frozenset(p for name in group for p in positions.get(name, ())) for group in linear),
        {factor: positions[name][0] for factor, name in (lookup or {}).items()},
        {factor: positions[name][0] for factor, name in (groups or {}).items()},
        rows or {},
        frozenset(even),
    )


def _solve_sizes(call: Call, dims: Dims, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    if len(dims) != len(shape):
        raise RuleError(f"rule of {call.op}: a term has {len(dims)} dims, but the tensor's shape is {list(shape)}")
    for group, size in zip(dims, shape, strict=True):
        unknown = [f for f in group if f not in sizes]
        known = math.prod(sizes[f] for f in group if f in sizes)
        if len(unknown) == 1 and known and size % known == 0:
            sizes[unknown[0]] = size // known


def _check_sizes(
    call: Call, terms: Sequence[Dims], shapes: Sequence[tuple[int, ...] | None], sizes: Mapping[str, int]
) -> None:
    for dims, shape in zip(terms, shapes, strict=True):
        if shape is None:
            continue
        for group, size in zip(dims, shape, strict=True):
            missing = [f for f in group if f not in sizes]
            if missing:
                raise RuleError(
                    f"rule of {call.op}: the size of factor {missing[0]!r} does not follow from the shapes {shapes}"
                )
            if group and math.prod(sizes[f] for f in group) != size:
                raise RuleError(
                    f"rule of {call.op}: dim {' '.join(group)} should have size {size} in {list(shape)}, the "
                    f"factors give {math.prod(sizes[f] for f in group)}"
                )


_TOKEN = re.compile(r"\([^()]*\)|\.\.\.|…|[A-Za-z_][A-Za-z0-9_]*\^?|1")


def parse_rule(text: str) -> tuple[list[list[tuple[str, ...]]], list[list[tuple[str, ...]]], frozenset[str]]:
    """Read `"b s h^, h -> b s h"` into terms of dims and the factors that stay whole.

    Raises:
        RuleError: with the position of what cannot be read.
    """
    left, arrow, right = text.partition("->")
    if not arrow or not left.strip() or not right.strip():
        raise RuleError(f'cannot read rule {text!r}: write inputs -> outputs, such as "m k, k n -> m n"')
    whole: set[str] = set()

    def term(part: str) -> list[tuple[str, ...]]:
        rest = _TOKEN.sub("", part).strip()
        if rest:
            raise RuleError(f"cannot read rule {text!r}: unexpected {rest!r} in term {part.strip()!r}")
        dims = []
        for token in _TOKEN.findall(part):
            names = token.strip("()").split() if token.startswith("(") else [token]
            whole.update(name[:-1] for name in names if name.endswith("^"))
            clean = tuple(name.removesuffix("^") for name in names)
            dims.append(() if clean == ("1",) else ("...",) if clean[0] in ("...", "…") else clean)
        flat = [name for group in dims for name in group]
        if len(set(flat)) != len(flat):
            raise RuleError(f"cannot read rule {text!r}: a factor occurs twice in the term {part.strip()!r}")
        return dims

    inputs = [term(part) for part in left.split(",")]
    outputs = [term(part) for part in right.split(",")]
    return inputs, outputs, frozenset(whole)


def written(text: str, *, reduce: Mapping[str, str] | None = None, linear: Sequence[Sequence[int]] = ()) -> Deriver:
    """A deriver from a written rule; `linear` gives positions of tensor inputs."""
    inputs, outputs, whole = parse_rule(text)

    def derive(call: Call) -> OpRule:
        ranks = [len(node.meta["val"].shape) for _, node in call.named]
        out_ranks = [len(v.shape) if isinstance(v, torch.Tensor) else 0 for v in call.outputs]
        if len(ranks) != len(inputs) or len(out_ranks) != len(outputs):
            raise RuleError(
                f"rule {text!r} of {call.op} has {len(inputs)} inputs and {len(outputs)} outputs; the call has "
                f"{len(ranks)} tensors and {len(out_ranks)} outputs"
            )
        ins = [_fill(term, rank) for term, rank in zip(inputs, ranks, strict=True)]
        outs = [_fill(term, rank) for term, rank in zip(outputs, out_ranks, strict=True)]
        by_name: dict[str, list[Dims]] = {}
        for (name, _), dims in zip(call.named, ins, strict=True):
            by_name.setdefault(name, []).append(dims)
        rule = build(call, by_name, outs, whole=whole, reduce=reduce)
        # The op would have to be told to make a part of a factor that no input brings: it stays whole.
        given = {name for dims in rule.inputs for group in dims for name in group}
        kept = rule.whole | {name for name in rule.factors if name not in given}
        return OpRule(
            rule.inputs,
            rule.outputs,
            rule.sizes,
            kept,
            rule.reduce,
            tuple(frozenset(group) for group in linear),
            rule.lookup,
        )

    return derive


def _fill(term: Sequence[tuple[str, ...]], rank: int) -> Dims:
    """Replace `...` by as many leading factors as the tensor has dims beyond those written."""
    if ("...",) not in term:
        return tuple(term)
    at = list(term).index(("...",))
    extra = rank - (len(term) - 1)
    return (*term[:at], *((f"_{i}",) for i in range(extra)), *term[at + 1 :])


def register_sharding_rule(
    op: str, rule: str, *, reduce: Mapping[str, str] | None = None, linear: Sequence[Sequence[int]] = ()
) -> None:
    """Teach autopar how an op may be cut.

    Args:
        op: qualified name, `"my_lib::my_op"` or `"my_lib::my_op.overload"`.
        rule: one term per tensor argument and output, e.g. `"b s h, h -> b s h"`; `h^` keeps `h` whole.
        reduce: for a factor that only inputs have, how partial results combine if not by a sum: `"max"` or `"min"`.
        linear: sets of tensor arguments (positions) in which the op is linear, so that unreduced sums may pass through.

    Raises:
        RuleError: if there is no such op, the rule cannot be read, or the other arguments do not fit it.
    """
    if not isinstance(op, str) or not re.fullmatch(r"\w+::\w+(\.\w+)?", op):
        raise RuleError(f'op name {op!r} is not of the form "library::op"')
    if not isinstance(rule, str):
        raise RuleError(f'rule of {op}: write it as text, such as "m k, k n -> m n", not {rule!r}')
    bad = {k: v for k, v in (reduce or {}).items() if v not in ("sum", "max", "min")}
    if bad:
        raise RuleError(f"rule of {op}: partial results combine by sum, max or min, not {bad}")
    inputs, _, _ = parse_rule(rule)
    factors = {name for term in inputs for dim in term for name in dim}
    if unknown := sorted(set(reduce or {}) - factors):
        raise RuleError(f"rule of {op}: reduce names {', '.join(unknown)}, which no input of {rule!r} has")
    if wrong := [position for group in linear for position in group if not 0 <= position < len(inputs)]:
        raise RuleError(f"rule of {op}: linear names argument {wrong[0]}, but {rule!r} has {len(inputs)} (from 0)")
    if not _exists(op):
        raise RuleError(f"there is no op {op}: import the library that defines it first, and mind the spelling")
    words = f"{rule} reduce={sorted((reduce or {}).items())} linear={[list(group) for group in linear]}"
    _USER_RULES[op.removesuffix(".default")] = words, written(rule, reduce=reduce, linear=linear)


def user_rules() -> dict[str, str]:
    """The ops that rules were registered for, each with its rule in words; equal words are equal rules."""
    return {op: words for op, (words, _) in _USER_RULES.items()}


def _exists(op: str) -> bool:
    """Whether PyTorch knows an op, or that overload of it."""
    library, _, name = op.partition("::")
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops, library), packet, None)
    return found is not None and (not overload or overload in found.overloads())
