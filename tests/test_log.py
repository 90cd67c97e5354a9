"""The console log of a rank."""

import logging
import re
from collections.abc import Iterator

import pytest

from scaling_slurm import log


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    logger = logging.getLogger(log.NAME)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_lines_carry_time_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(rank=3)
    logging.getLogger("scaling_slurm.core.trainer").warning("loss %s", 1.5)
    logging.getLogger("scaling_slurm.core.trainer").debug("not shown")
    written = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 3 W loss 1\.5\n", written)


def test_a_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(rank=0)
    log.configure(rank=1, level="WARNING")
    logging.getLogger("scaling_slurm").info("no")
    logging.getLogger("scaling_slurm").warning("yes")
    assert capsys.readouterr().err.count("yes") == 1
