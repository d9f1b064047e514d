"""`python -m autopar`."""

from autopar.cli import app

app(prog_name="autopar")
