"""autopar: a compiler for distributed training in PyTorch.

pm = autopar.parallelize(model, mesh, mem_gb=80)     # trace, plan, rewrite, shard the parameters in place
print(pm.plan)                                       # per-layer placements, memory, step time, alternatives
pm.export("debug/")                                  # the rewritten graph, readable and re-runnable
plan = autopar.plan(model, "2x8 H100-80GB", example_inputs=batch)   # the same plan without the cluster
"""

# `autopar.plan` is the function; `from autopar.plan import Plan` still finds the module of that name.

from autopar.api import parallelize
from autopar.checkpoint import load_checkpoint, save_checkpoint
from autopar.errors import (
    AutoparError,
    BatchError,
    CheckpointError,
    CollectiveError,
    InfeasibleBudgetError,
    InputError,
    MeshError,
    NanError,
    PlanError,
    RuleError,
    StaleModelError,
    TraceError,
    VerificationError,
)
from autopar.frontier import Pareto
from autopar.nan_search import find_nan
from autopar.offline import pareto, plan
from autopar.plan import Plan, break_even
from autopar.plan_file import load_plan, save_plan
from autopar.rehearsal import verify
from autopar.rules import register_sharding_rule
from autopar.runtime.module import ParallelModule
from autopar.verification import VerifyReport

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "BatchError",
    "CheckpointError",
    "CollectiveError",
    "InfeasibleBudgetError",
    "InputError",
    "MeshError",
    "NanError",
    "ParallelModule",
    "Pareto",
    "Plan",
    "PlanError",
    "RuleError",
    "StaleModelError",
    "TraceError",
    "VerificationError",
    "VerifyReport",
    "break_even",
    "find_nan",
    "load_checkpoint",
    "load_plan",
    "parallelize",
    "pareto",
    "plan",
    "register_sharding_rule",
    "save_checkpoint",
    "save_plan",
    "verify",
]
