"""Our dropout does what torch's does, with other random numbers."""

from __future__ import annotations

import pytest
import torch

from slurmft.train.engine import cpu


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_are_dropped_at_the_rate_and_the_mean_stays(
    p: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.ones(301, 999, dtype=dtype)
    found = cpu.dropout(x, p)
    dropped = found == 0
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert abs(float(dropped.float().mean()) - p) < 5 * deviation
    assert torch.allclose(found[~dropped].float(), torch.tensor(1 / (1 - p)), rtol=1e-2)
    by_column = dropped.float().mean(0)  # four of them share a draw
    assert float((by_column - p).abs().max()) < 6 * (p * (1 - p) / len(x)) ** 0.5


def test_gradients_pass_where_elements_did() -> None:
    x = torch.randn(7, 5, 3).transpose(0, 2).requires_grad_()
    found = cpu.dropout(x, 0.3)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), found.detach())


def test_nothing_and_everything() -> None:
    x = torch.randn(5)
    assert cpu.dropout(x, 0.0) is x
    assert not cpu.dropout(x, 1.0).any()
    assert cpu.dropout(torch.empty(0, 3), 0.5).shape == (0, 3)


def test_a_seed_gives_the_same_numbers_again() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(cpu.dropout(torch.ones(50), 0.5))
    assert torch.equal(*found)


def test_modules_are_replaced() -> None:
    model = torch.nn.Sequential(
        torch.nn.Dropout(0.5), torch.nn.Sequential(torch.nn.Dropout(0.2))
    )
    cpu.replace_dropout(model)
    kinds = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert [(type(m), m.p) for m in kinds] == [(cpu.Dropout, 0.5), (cpu.Dropout, 0.2)]
    x = torch.ones(1000)
    assert (model(x) == 0).any()
    assert torch.equal(model.eval()(x), x)
