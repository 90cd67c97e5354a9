"""Entry of all programs: the first argument says which one this is. Runs without site packages."""

import os
import sys


def main(arguments: list[str]) -> int:
    """Run one program; the value is its exit code."""
    program, *rest = arguments
    match program:
        case "sbatch":
            from scaling_slurm.slurm.local_scheduler.sbatch import sbatch

            return sbatch(rest)
        case "srun":
            from scaling_slurm.slurm.local_scheduler.srun import srun

            return srun(rest)
        case "scontrol":
            from scaling_slurm.slurm.local_scheduler.control import scontrol

            return scontrol(rest)
        case "scancel":
            from scaling_slurm.slurm.local_scheduler.control import scancel

            return scancel(rest)
        case "squeue":
            from scaling_slurm.slurm.local_scheduler.queries import squeue

            return squeue(rest)
        case "sacct":
            from scaling_slurm.slurm.local_scheduler.queries import sacct

            return sacct(rest)
        case "driver":
            from scaling_slurm.slurm.local_scheduler.driver import drive

            return drive(int(rest[0]))
        case _:
            raise ValueError(f"no such program: {program}")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
