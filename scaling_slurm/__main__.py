"""`python -m scaling_slurm`: the `scaling` command where its console script is not on PATH."""

from scaling_slurm.cli.main import main

main()
