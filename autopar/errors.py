"""The errors that autopar raises for its users.

Each is an `AutoparError` and also the fitting built-in, so that callers can catch either.  A message says
what went wrong, where, with numbers, and what to do next.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class MeshError(AutoparError, ValueError):
    """The mesh is malformed, or does not fit the process group or the strategy."""


class BatchError(AutoparError, ValueError):
    """The batch cannot be cut over the ranks, or the ranks disagree about it."""


class InputError(AutoparError, ValueError):
    """An argument has a wrong type, shape or value."""


class TraceError(AutoparError, RuntimeError):
    """The model cannot be traced to one graph."""


class FoldError(TraceError):
    """A folded graph does not tell the nodes of the units that it leaves out: its inner units do not correspond."""


class RuleError(AutoparError, ValueError):
    """A sharding rule is malformed or contradicts the operator it is for."""


class PlanError(AutoparError, ValueError):
    """A plan is malformed, stale, or belongs to another model, mesh or version."""


class InfeasibleBudgetError(AutoparError, MemoryError):
    """No candidate fits the memory budget.

    Attributes:
        smallest_feasible_gb: the smallest budget in GiB under which a candidate fits, rounded up to the third digit
            after the point.
    """

    def __init__(self, message: str, smallest_feasible_gb: float) -> None:
        super().__init__(message)
        self.smallest_feasible_gb = smallest_feasible_gb


class VerificationError(AutoparError, ArithmeticError):
    """The rewritten program's numbers differ from the single device's."""


class NanError(AutoparError, FloatingPointError):
    """A step met a value that is not a number, or its loss is infinite."""


class CollectiveError(AutoparError, RuntimeError):
    """A collective failed or timed out: another rank is gone, hangs, or cannot be reached."""


class CheckpointError(AutoparError, RuntimeError):
    """A checkpoint cannot be written or read, is damaged, or is of another model."""


class StaleModelError(AutoparError, RuntimeError):
    """Model, plan or ranks changed after planning and no longer match the compiled program."""
