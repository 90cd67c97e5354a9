"""The console log of a rank: plain lines with time and rank. Knows nothing of what is logged."""

import logging

NAME = "scaling_slurm"


def configure(rank: int = 0, level: int | str = logging.INFO) -> logging.Logger:
    """Send the package's log to stderr, where a batch job's log file takes it. A second call replaces the first."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger(NAME)
    for previous in list(logger.handlers):
        logger.removeHandler(previous)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return logger
