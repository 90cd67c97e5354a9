"""Numbers of a run: in metrics.jsonl always, on the console now and then, in TensorBoard if asked."""

import logging
import math
import sys
from pathlib import Path

import pytest
import torch

from scaling_slurm.core.trainer.metrics import MetricsLog, memory_gib
from scaling_slurm.errors import ConfigError
from scaling_slurm.run_directory import read_lines


def write(log: MetricsLog, steps: int) -> None:
    for step in range(1, steps + 1):
        log.write("training", step, {"loss": 1.0 / step, "tokens": 64.0})
    log.write("evaluation", steps, {"loss": 0.5})
    log.close()


def test_every_step_is_a_record(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(MetricsLog(path, None, attempt=2, num_steps=3, interval=10), 3)
    records = list(read_lines(path))
    assert [(record["kind"], record["step"], record["attempt"], record["loss"]) for record in records] == [
        ("training", 1, 2, 1.0),
        ("training", 2, 2, 0.5),
        ("training", 3, 2, 1 / 3),
        ("evaluation", 3, 2, 0.5),
    ]
    write(MetricsLog(path, None, attempt=3, num_steps=3, interval=10), 1)
    assert list(read_lines(path))[:4] == records, "what was written stays"


def test_a_value_that_is_no_number_is_null_as_json_has_no_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="scaling_slurm.core.trainer.metrics"):
        log = MetricsLog(tmp_path / "m", None, 1, 1, 1)
        log.write("training", 1, {"loss": math.nan, "gradient_norm": math.inf, "tokens": 3.0})
    [record] = read_lines(tmp_path / "m")
    assert (record["loss"], record["gradient_norm"], record["tokens"]) == (None, None, 3.0)
    assert "NaN" not in (tmp_path / "m").read_text()
    assert caplog.records[0].message.endswith("loss nan  gradient_norm inf"), "people are told"


def test_the_console_has_each_interval_the_last_step_and_every_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="scaling_slurm.core.trainer.metrics"):
        write(MetricsLog(tmp_path / "m", None, attempt=1, num_steps=10, interval=4), 10)
    assert [record.message for record in caplog.records] == [
        "training  step 4/10  loss 0.5208",
        "training  step 8/10  loss 0.1586",
        "training  step 10/10  loss 0.1056",
        "evaluation  step 10/10  loss 0.5000",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (12345.6, "12,346"),
        (1.5, "1.5000"),
        (3e-4, "0.0003"),
        (1.23456e-7, "1.235e-07"),
        (0.0, "0.0"),
        (math.nan, "nan"),
    ],
)
def test_numbers_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float, shown: str):
    with caplog.at_level(logging.INFO, logger="scaling_slurm.core.trainer.metrics"):
        MetricsLog(tmp_path / "m", None, 1, 1, 1).write("training", 1, {"learning_rate": value})
    assert caplog.records[0].message.endswith(f"learning_rate {shown}")


def test_ranks_without_a_path_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="scaling_slurm.core.trainer.metrics"):
        write(MetricsLog(None, tmp_path / "tensorboard", attempt=1, num_steps=2, interval=1), 2)
    assert not list(tmp_path.iterdir())
    assert not caplog.records


def test_tensorboard_reads_the_same_numbers(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(MetricsLog(tmp_path / "m", tmp_path / "tensorboard", attempt=1, num_steps=3, interval=1), 3)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"training/loss", "training/tokens", "evaluation/loss"}
    scalars = events.Scalars("training/loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert [scalar.value for scalar in scalars] == pytest.approx([1.0, 0.5, 1 / 3])


def test_tensorboard_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed; pip install .*\[tensorboard\].*run file"):
        MetricsLog(tmp_path / "m", tmp_path / "tensorboard", 1, 1, 1)


def test_memory_of_a_process_is_its_peak():
    block = torch.ones(64 * 2**18)  # 64 MiB
    peak = memory_gib(torch.device("cpu"))
    assert peak > 0.0625
    del block
    assert memory_gib(torch.device("cpu")) >= peak
