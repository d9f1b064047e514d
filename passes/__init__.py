"""The rewrite: passes from a joint graph and a plan to one rank's program; `pipeline` lists them in order."""
