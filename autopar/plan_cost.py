"""What a plan costs as expressions, and where two plans cost the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True)
class SymbolicCost:
    """One rank's step in symbols: sizes of the model (`batch`, `seq`, `hidden`, …), `ranks_AXIS` for each mesh axis,
    and rates of the device and the links.

    Attributes:
        flops: floating-point operations, a multiply-add being two.
        moved_bytes: device memory traffic of the ops.
        wire_bytes: for each mesh axis, the bytes that the rank sends along it, by the ring formulas.
        saved_bytes: what the forward pass keeps for the backward pass.
        time_s: seconds of a step in which nothing overlaps.
        values: for each symbol, its name and the value it had when the plan was priced.

    Sizes enter the counts exactly.  In `time_s`, each op keeps the efficiency that it had at its priced shape, and
    each collective the ways to run it that its group has (their number of hops too), of which the fastest is taken.
    """

    flops: sympy.Expr
    moved_bytes: sympy.Expr
    wire_bytes: Mapping[str, sympy.Expr]
    saved_bytes: sympy.Expr
    time_s: sympy.Expr
    values: Mapping[str, float]

    def at(self, expression: sympy.Expr, **changes: float) -> Any:
        """The value of an expression, with some symbols changed.

        Raises:
            InputError: if a changed symbol does not occur in this cost.
        """
        import sympy

        self.check(*changes)
        values = {**self.values, **changes}
        return expression.xreplace({symbol: sympy.sympify(values[symbol.name]) for symbol in expression.free_symbols})

    def check(self, *names: str) -> None:
        """Refuse names that are no symbols here.

        Raises:
            InputError: with the names that are.
        """
        unknown = [name for name in names if name not in self.values]
        if unknown:
            raise InputError(f"the cost has no symbol {unknown[0]!r}; it has {', '.join(sorted(self.values))}")

    def time_along(self, name: str) -> Callable[[float], float]:
        """`time_s` as a function of one symbol, the others as they were priced; quick to call."""
        import sympy

        self.check(name)
        symbols = sorted(self.time_s.free_symbols, key=lambda symbol: str(symbol.name))
        function = sympy.lambdify(symbols, self.time_s, modules=["math"])
        known = {symbol.name: float(self.values[symbol.name]) for symbol in symbols}

        def seconds(value: float) -> float:
            return float(function(*({**known, name: value}[symbol.name] for symbol in symbols)))

        return seconds


@dataclass(frozen=True, eq=False)
class PlanCost:
    """A plan's cost, from which the expressions are worked out when they are first asked for."""

    build: Callable[[], SymbolicCost]

    @functools.cached_property
    def _symbolic(self) -> SymbolicCost:
        return self.build()

    def symbolic(self) -> SymbolicCost:
        """The cost as SymPy expressions."""
        return self._symbolic

    def __deepcopy__(self, memo: object) -> PlanCost:
        return self  # nothing in it changes, and a copy would work the expressions out

    def __reduce__(self) -> tuple[Any, ...]:
        return _known, (self.symbolic(),)


def _known(cost: SymbolicCost) -> PlanCost:
    return PlanCost(functools.partial(_itself, cost))


def _itself(cost: SymbolicCost) -> SymbolicCost:
    return cost


_DECADES = 6
_POINTS_A_DECADE = 32


def crossing(one: SymbolicCost, other: SymbolicCost, symbol: str) -> float | None:
    """The value of a symbol at which two costs take the same time; see `autopar.break_even`."""
    from scipy.optimize import brentq

    mine, theirs = one.time_along(symbol), other.time_along(symbol)

    def difference(exponent: float) -> float:
        value = 10.0**exponent
        return mine(value) - theirs(value)

    middle = math.log10(one.values[symbol])
    steps = range(-_DECADES * _POINTS_A_DECADE, _DECADES * _POINTS_A_DECADE + 1)
    points = [middle + step / _POINTS_A_DECADE for step in steps]
    signs = [math.copysign(1.0, d) if (d := difference(point)) else 0.0 for point in points]
    roots = [point for point, sign in zip(points, signs, strict=True) if sign == 0]
    roots += [
        float(brentq(difference, points[i], points[i + 1], xtol=1e-12))
        for i in range(len(points) - 1)
        if signs[i] * signs[i + 1] < 0
    ]
    if not roots or not any(signs):  # equal everywhere is no crossing
        return None
    return float(10.0 ** min(roots, key=lambda root: abs(root - middle)))
