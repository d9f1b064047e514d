"""Install a wheel into an empty environment and import every module of it from another directory.

An editable install sees the repository's folders, so a package left out of `pyproject.toml` goes unnoticed there.
The dependencies are borrowed from the running interpreter's environment through a `.pth` file, which adds its
modules but not its editable installs.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("autopar", "cost_model", "passes", "runtime")

IMPORT_ALL = """
import importlib, sys
names = sys.argv[2:]
for name in names:
    module = importlib.import_module(name)
    if not module.__file__.startswith(sys.argv[1]):
        sys.exit(f"{name} was imported from {module.__file__}, not from the wheel")
print(f"wheel: {len(names)} modules imported from elsewhere")
"""


def module_names() -> list[str]:
    """Dotted names of all modules that the repository's folders hold, as installed."""
    names = []
    for folder in FOLDERS:
        package = folder if folder == "autopar" else f"autopar.{folder}"
        for path in sorted((ROOT / folder).glob("*.py")):
            names.append(package if path.stem == "__init__" else f"{package}.{path.stem}")
    return [name for name in names if not name.endswith(".__main__")]


def main(wheel: str) -> None:
    """Install `wheel` into a temporary environment and import all it should hold; ends the process."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch).resolve() / "env"
        venv.create(home, with_pip=False)
        python = home / "bin" / "python"
        query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip())
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), wheel]
        subprocess.run(pip, check=True)
        command = [str(python), "-c", IMPORT_ALL, str(site), *module_names()]
        status = subprocess.run(command, check=False, cwd=scratch).returncode
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
