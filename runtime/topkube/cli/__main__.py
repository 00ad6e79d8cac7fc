"""`python -m topkube.cli`: the same as `topkube`."""

from topkube.cli import main

main()
