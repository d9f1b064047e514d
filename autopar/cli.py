"""The command line: `autopar plan` and `autopar explain`.

The answer goes to standard output, and everything else to standard error.  A fault in what was asked for is one
message and exit code 2; a budget that nothing fits is exit code 3.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

from autopar import offline
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InfeasibleBudgetError, InputError
from autopar.models import find_model, model_shapes
from autopar.plan import Plan
from autopar.plan_cache import open_cache
from autopar.plan_file import load_plan, save_plan
from autopar.precision import compute_dtype
from autopar.progress import progress


class Dtype(str, enum.Enum):
    """What parameters rest in."""

    FP32 = "fp32"
    BF16 = "bf16"


_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16}

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        # (No colon after `factory`: typer would show an emoji.)
        help="A built-in shape, a local directory with a Hugging Face config.json, or module:factory, a function in a "
        "module of this directory that returns a module or (module, example_inputs). Shapes: "
        f"{', '.join(model_shapes())}.",
    ),
]
ClusterOption = Annotated[str, typer.Option(help='What to plan for: "2x8 H100-80GB" (nodes × devices), "8xA100-80GB".')]
MemoryOption = Annotated[
    float | None, typer.Option("--mem-gb", help="Budget in GiB on one device; by default all that it has.")
]
BatchOption = Annotated[
    int | None, typer.Option(help="Sequences of the global batch, which all ranks share; by default one a rank.", min=1)
]
SeqOption = Annotated[
    int | None, typer.Option(help="Tokens of a sequence; by default the model's most, up to 4096.", min=1)
]
OptimizerOption = Annotated[str, typer.Option(help="Whose state counts: adamw, sgd, adafactor, adamw_8bit, …")]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help="Compute in bf16 (or fp16) while parameters rest, and gradients are summed, in float32, or in --dtype. By "
        "default the model computes in the dtype of its parameters."
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Cast the parameters, as model.to(dtype) does: with bf16 gradients and optimizer state are bfloat16 too, "
        "and there is no float32 copy. By default float32 with --precision, else what the config says."
    ),
]
StrategyOption = Annotated[str, typer.Option(help="auto, or a named one: ddp, zero1, zero2, zero3, hsdp, tp, tp+sp, …")]
MeshOption = Annotated[
    str | None, typer.Option(help='Shape of the mesh, such as "2x8"; by default nodes × devices of each.')
]
CacheOption = Annotated[
    bool, typer.Option("--cache/--no-cache", help="Take the plan that was kept when the same was asked, or keep it.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Do not show on the terminal what goes on.")]
LayersOption = Annotated[int | None, typer.Option(help="Other number of layers, for a quick look.", min=1)]

_OPTIMIZER, _STRATEGY = "adamw", "auto"

app = typer.Typer(
    name="autopar",
    help="Plan the training of a model on a cluster, without the cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("plan")
def plan_command(
    model: ModelArgument,
    cluster: ClusterOption,
    mem_gb: MemoryOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    optimizer: OptimizerOption = _OPTIMIZER,
    precision: PrecisionOption = None,
    dtype: DtypeOption = None,
    strategy: StrategyOption = _STRATEGY,
    mesh: MeshOption = None,
    layers: LayersOption = None,
    cache: CacheOption = True,
    quiet: QuietOption = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the plan to this file too.")
    ] = None,
) -> None:
    """Find the fastest way to train MODEL on a cluster within the memory of its devices."""
    with _errors_as_exit_codes():
        if json_path is not None and not json_path.parent.is_dir():
            raise InputError(f"cannot write {str(json_path)!r}: there is no directory {str(json_path.parent)!r}")
        words, plan = _make_plan(
            model, cluster, mem_gb, batch, seq, optimizer, precision, dtype,
            strategy=strategy, mesh=mesh, layers=layers, cache=cache, quiet=quiet,
        )  # fmt: skip
        typer.echo(f"{words}\n\n{plan}")
        if json_path is not None:
            save_plan(plan, json_path)
            typer.echo(f"wrote {json_path}", err=True)


@app.command("explain")
def explain_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|PLAN", help="As for `plan`, or a plan that it wrote (--json).")
    ],
    module: Annotated[str, typer.Option(help="Path of a module, such as model.layers.3.mlp; by default all.")] = "",
    cluster: Annotated[str | None, typer.Option(help="As for `plan`; a plan file brings its own.")] = None,
    mem_gb: MemoryOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    optimizer: OptimizerOption = _OPTIMIZER,
    precision: PrecisionOption = None,
    dtype: DtypeOption = None,
    strategy: StrategyOption = _STRATEGY,
    mesh: MeshOption = None,
    layers: LayersOption = None,
    cache: CacheOption = True,
    quiet: QuietOption = False,
) -> None:
    """Say why a module of MODEL runs as it does, and what the other candidates cost there."""
    with _errors_as_exit_codes():
        if _is_plan_file(Path(model)):
            asked = (cluster, mem_gb, batch, seq, precision, dtype, mesh, layers)
            if any(value is not None for value in asked) or (optimizer, strategy) != (_OPTIMIZER, _STRATEGY):
                raise InputError(f"{model} is a plan that is made already: only --module goes with it")
            plan = load_plan(model)
        elif cluster is None:
            if Path(model).suffix == ".json" and not os.path.exists(model):
                raise InputError(f"there is no plan file {model}")
            raise InputError(f'which cluster is {model} planned for? Give --cluster, such as "8xA100-80GB"')
        else:
            plan = _make_plan(
                model, cluster, mem_gb, batch, seq, optimizer, precision, dtype,
                strategy=strategy, mesh=mesh, layers=layers, cache=cache, quiet=quiet,
            )[1]  # fmt: skip
        typer.echo(plan.explain(module))


def _make_plan(
    model: str,
    cluster: str,
    mem_gb: float | None,
    batch: int | None,
    seq: int | None,
    optimizer: str,
    precision: str | None,
    dtype: Dtype | None,
    *,
    strategy: str,
    mesh: str | None,
    layers: int | None,
    cache: bool,
    quiet: bool,
) -> tuple[str, Plan]:
    """Words for what is planned, and the plan."""
    described = Cluster.parse(cluster)
    compute_dtype(precision)  # refused before any work
    if dtype is None and precision is not None:
        dtype = Dtype.FP32
    with progress(shown=not quiet) as say, _prints_to_stderr():
        say(f"reading {model}")
        call = find_model(
            model,
            described.num_ranks,
            batch=batch,
            seq=seq,
            dtype=None if dtype is None else _DTYPES[dtype],
            num_layers=layers,
        )
        settings = {"optimizer": optimizer, "precision": precision}
        plan = offline.plan_with(
            call.model,
            described,
            mem_gb,
            call.example_inputs,
            mesh,
            strategy,
            settings,
            cache=open_cache(cache),
            say=say,
        )
    return call.words, plan


def _is_plan_file(path: Path) -> bool:
    """Whether a file is a saved plan; a config of transformers is JSON too, but has no schema version."""
    if path.suffix != ".json" or not os.path.isfile(path):
        return False
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return True  # `load_plan` says what is wrong with it
    return isinstance(content, dict) and "schema_version" in content


@contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    try:
        yield
    except InfeasibleBudgetError as error:
        _fail(error, 3)
    except AutoparError as error:
        _fail(error, 2)


def _fail(error: AutoparError, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)


@contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """Keep standard output for the answer: HiGHS (1.12) writes to it whatever its options say, and so may a factory."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


__all__ = ["app"]
