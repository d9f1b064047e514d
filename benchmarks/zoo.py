"""Every model of a zoo, under every strategy, compared with the single device.

    python -m benchmarks.zoo --zoo FILE.py [--only NAME,NAME] [--strategies ddp,zero3,…] [--mesh 4,2x2] --json OUT

FILE.py holds `REGISTRY`, a dict from name to an entry with `build() -> nn.Module`,
`make_batch(batch_size, seed) -> (args, kwargs)` and `loss_fn(output) -> scalar tensor`.  Each model is wrapped with its
loss, dropout is switched off, and `autopar.verify` runs all ranks in one process in float64.  OUT is a list of

    {"model", "strategy", "mesh", "ok", "refused", "max_rel_err", "sharded_flops_fraction", "error", "seconds", "steps"}

`ok`: loss, outputs, every gradient and buffer are within 1e-9 of the single device's, relative to the tensor's largest
entry, and the same, with every parameter, after `steps` steps of AdamW.  `refused`: autopar declined with an
error that says why.  Rows that OUT already has are not run again: delete those that a change
touches.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.errors import AutoparError, VerificationError

STRATEGIES = "ddp,zero3,tp,fsdp+tp,auto"
TOLERANCE = 1e-9
DROPOUT_WORDS = ("dropout", "drop_prob", "pdrop", "layerdrop", "drop_path")


class WithLoss(nn.Module):
    """A model and its loss as one module: returns the loss and every other tensor of the model's output."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        output = self.model(*args, **kwargs)
        loss = self.loss_fn(output)
        return loss, *(t for t in tensors_in(output) if t is not loss)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors inside nested dicts, tuples and lists, each once, in order; other objects are passed over."""
    seen: set[int] = set()

    def walk(item: object) -> Iterator[torch.Tensor]:
        if isinstance(item, torch.Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
        elif isinstance(item, Mapping):
            for part in item.values():
                yield from walk(part)
        elif isinstance(item, (tuple, list)):
            for part in item:
                yield from walk(part)

    return walk(value)


def switch_off_dropout(model: nn.Module) -> None:
    """Set every dropout probability of modules and of the configurations they hold to 0."""
    holders: list[object] = []
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)):
            module.p = 0.0
        holders += [module, *(v for k, v in vars(module).items() if "config" in k and hasattr(v, "__dict__"))]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if type(value) is float and value > 0 and any(word in name for word in DROPOUT_WORDS):
                setattr(holder, name, 0.0)


def load_registry(path: Path) -> dict[str, Any]:
    """`REGISTRY` of the Python file at `path`, which may import the files beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up by name
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return dict(module.REGISTRY)


def check(entry: Any, strategy: str, mesh: str, batch: int, steps: int = 3) -> dict[str, Any]:
    """One row of the result: `entry` under `strategy` on `mesh`."""
    row: dict[str, Any] = {
        "model": entry.name, "strategy": strategy, "mesh": mesh, "ok": False, "refused": False,
        "max_rel_err": None, "sharded_flops_fraction": None, "error": None, "seconds": 0.0, "steps": steps,
    }  # fmt: skip
    start = time.perf_counter()
    try:
        model = entry.build()
        switch_off_dropout(model)
        whole, inputs = WithLoss(model, entry.loss_fn), entry.make_batch(batch, 0)
        report = autopar.verify(whole, strategy, inputs, mesh=mesh, num_steps=steps)
        largest = sys.float_info.max  # JSON has no infinity
        row["max_rel_err"] = float(report.max_rel_err) if report.max_rel_err <= largest else largest
        row["sharded_flops_fraction"] = float(report.sharded_flops_fraction)
        row["ok"] = bool(report.ok and report.max_rel_err <= TOLERANCE)
        if not row["ok"]:
            row["error"] = f"{report.worst} differs by {report.max_rel_err:.2e}"
    except VerificationError as error:  # wrong numbers are not a refusal
        row["error"] = describe(error)
    except AutoparError as error:
        row["refused"], row["error"] = True, describe(error)
    except Exception as error:  # noqa: BLE001  one model that breaks must not hide the others
        row["error"] = describe(error)
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def describe(error: Exception) -> str:
    """Type and text of an error, of bounded length."""
    return f"{type(error).__name__}: {error}"[:2000]


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Models down, strategies across, and below it why a row is not ok."""
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    cells = {(row["model"], row["strategy"]): verdict(row) for row in rows}
    table = Table("model", *strategies, title=f"mesh {rows[0]['mesh']}: largest relative error, share of FLOPs sharded")
    for model in dict.fromkeys(row["model"] for row in rows):
        table.add_row(model, *(cells.get((model, strategy), "") for strategy in strategies))
    console.print(table)
    for row in rows:
        if row["error"]:
            console.print(f"{row['model']} {row['strategy']}: {row['error'][:300]}", markup=False, highlight=False)
    counts = {word: sum(verdict(row).startswith(word) for row in rows) for word in ("ok", "refused", "WRONG", "error")}
    console.print(", ".join(f"{count} {word}" for word, count in counts.items()) + f" of {len(rows)}")


def verdict(row: dict[str, Any]) -> str:
    """A row in a few characters."""
    if row["refused"]:
        return "refused"
    if row["max_rel_err"] is None:
        return "error"
    word = "ok" if row["ok"] else "WRONG"
    return f"{word} {row['max_rel_err']:.0e} {100 * row['sharded_flops_fraction']:.0f}%"


def zoo_parser(name: str, description: str | None, strategies: str) -> argparse.ArgumentParser:
    """A benchmark's arguments that say which models of a registry file run how."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description, formatter_class=raw)
    parser.add_argument("--zoo", type=Path, required=True, metavar="FILE.py")
    parser.add_argument("--only", metavar="NAME,NAME", help="these models; all without it")
    parser.add_argument("--strategies", default=strategies)
    parser.add_argument("--mesh", default="4", help="4 or 2x2")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


def chosen_models(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Any]:
    """The entries of the registry file that are asked for, by name; ends the program for a name that it lacks."""
    registry = load_registry(arguments.zoo.resolve())
    names = arguments.only.split(",") if arguments.only else list(registry)
    unknown = [name for name in names if name not in registry]
    if unknown:
        parser.error(f"no model {', '.join(unknown)} in {arguments.zoo}; there are {', '.join(registry)}")
    return {name: registry[name] for name in names}


def main() -> None:
    parser = zoo_parser("zoo", __doc__, STRATEGIES)
    parser.add_argument("--steps", type=int, default=3, help="of AdamW, after which all is compared again")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    models = chosen_models(parser, arguments)
    strategies, meshes = arguments.strategies.split(","), arguments.mesh.split(",")
    rows = kept_rows(arguments.json)
    for mesh, name, strategy in itertools.product(meshes, models, strategies):
        if any(key_of(row) == (name, strategy, mesh) for row in rows):
            continue
        rows.append(check(models[name], strategy, mesh, arguments.batch, arguments.steps))
        print(f"{name} {strategy} {mesh}: {verdict(rows[-1])} ({rows[-1]['seconds']} s)", flush=True)
        if arguments.json:  # after every row, so that nothing is lost if the process dies
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()
    for mesh in meshes:
        asked = {(name, strategy, mesh) for name, strategy in itertools.product(models, strategies)}
        found = [row for row in rows if key_of(row) in asked]
        print_table(found, Console(width=max(Console().width, 26 + 17 * len(strategies))))


def kept_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows that an earlier run left at `path`."""
    return json.loads(path.read_text()) if path is not None and path.exists() else []


def key_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """What a row is about: model, strategy and mesh."""
    return row["model"], row["strategy"], row["mesh"]


if __name__ == "__main__":
    main()
