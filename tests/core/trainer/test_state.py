import math

import pytest
import torch

from scaling_slurm.core.trainer.preemption import StopCause
from scaling_slurm.core.trainer.state import Agreement, AgreementInFlight


@pytest.mark.parametrize(
    ("deadline", "signal", "stop_file", "cause"),
    [
        (0, 0, 0, StopCause.NONE),
        (1, 0, 0, StopCause.DEADLINE),
        (1, 2, 0, StopCause.SIGNAL),
        (1, 1, 1, StopCause.STOP_FILE),
    ],
)
def test_the_strongest_cause_counts(deadline, signal, stop_file, cause):
    assert Agreement(1.0, 2.0, 3.0, 0.0, deadline, signal, stop_file).stop == cause


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_or_a_norm_that_is_not_finite_is_noticed(bad):
    assert Agreement(1.0, 2.0, 3.0, 0, 0, 0, 0).finite
    assert not Agreement(bad, 2.0, 3.0, 0, 0, 0, 0).finite
    assert not Agreement(1.0, 2.0, bad, 0, 0, 0, 0).finite


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_read_is_what_was_agreed_on_even_if_the_vector_changes_later(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    vector = torch.arange(7, dtype=torch.float64, device=device)
    in_flight = AgreementInFlight(vector.clone())
    vector.zero_()
    assert in_flight.read() == Agreement(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
