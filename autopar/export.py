"""Export: a compiled program as files that a reader can open, read and run."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.diagram import render_dot
from autopar.diagram_svg import render_svg
from autopar.errors import InputError
from autopar.export_text import program_text
from autopar.plan import Plan
from autopar.plan_file import plan_to_json, replace_file
from autopar.program import LocalProgram
from autopar.show import render_plan


def export_program(program: LocalProgram, plan: Plan, directory: str | os.PathLike[str]) -> list[Path]:
    """Write a program and its plan into a directory, which is made if it is not there.

    Files: `program.py`, the rewritten forward and backward pass as Python that runs by itself; `plan.json`, which
    `load_plan` reads; `plan.txt`, the printed plan; `graph.dot` and `graph.svg`, modules and collectives as a picture;
    and `constant_*.npy`, large constant tensors of the program if it has any.  Files of these names are replaced, each
    in one step.

    Returns:
        The paths written.

    Raises:
        InputError: if the directory cannot be made or written to, or the program holds something that has no form as
            Python text.
        PlanError: if the plan cannot be written.
    """
    directory = Path(directory)
    title = f"{plan.strategy} on mesh {program.mesh}"
    python = program_text(program, plan)
    contents = {
        "program.py": python.text.encode(),
        **python.constants,
        "plan.json": plan_to_json(plan).encode(),
        "plan.txt": f"{render_plan(plan)}\n".encode(),
        "graph.dot": render_dot(program, title).encode(),
        "graph.svg": render_svg(program, title).encode(),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"cannot export to {str(directory)!r}: it is a file; name a directory") from error
    except OSError as error:
        raise InputError(f"cannot make directory {str(directory)!r} to export to: {error.strerror or error}") from error
    for name, content in contents.items():
        replace_file(directory / name, content)
    return [directory / name for name in contents]
