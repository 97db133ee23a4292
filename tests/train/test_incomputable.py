"""What a model cannot compute has words."""

import pytest
import torch

from slurmft.core.errors import UsageError
from slurmft.train.loop.incomputable import in_backward, in_precision


@pytest.mark.parametrize(
    "message",
    [
        "Unsupported dtype BFloat16",
        "value cannot be converted to type c10::BFloat16 without overflow",
        "\"fft\" not implemented for 'Half'",
        "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
        "precision",
    ],
)
def test_an_operation_without_code_for_the_precision(message: str) -> None:
    """As Fourier transforms on GPUs, which FNet computes."""
    model = torch.nn.Linear(1, 1)
    with (
        pytest.raises(UsageError, match="Linear cannot be computed in bf16") as error,
        in_precision("bf16", model),
    ):
        raise RuntimeError(message)
    assert error.value.hint == "use --precision fp32"
    with pytest.raises(RuntimeError, match=r"^another$"), in_precision("bf16", model):
        raise RuntimeError("another")
    with pytest.raises(RuntimeError) as as_torch_says, in_precision("fp32", model):
        raise RuntimeError(message)
    assert str(as_torch_says.value) == message


def test_a_loss_that_depends_on_no_trained_weight() -> None:
    """As that of LED, where adapters stand in its global attention alone."""
    model = torch.nn.Linear(1, 1)
    message = "does not depend on any of the weights"
    with pytest.raises(UsageError, match=message), in_backward(model):
        torch.autograd.backward(torch.zeros(1).sum())
    with pytest.raises(RuntimeError, match="another"), in_backward(model):
        raise RuntimeError("another")
