"""`python -m ecoformer` is the `ecoformer` command."""

from ecoformer.cli import main

main()
