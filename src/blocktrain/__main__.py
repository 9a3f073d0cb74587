"""`python -m blocktrain` is the `blocktrain` command."""

from blocktrain.cli import main

main()
