"""torch's flash attention of CUDA, as a CPU computes it: sequence by sequence, refusing what the
real one refuses. What it does not cover is NaN, as memory that nobody wrote may be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmft.train.engine import packed_attention

calls: list[str] = []


def check(
    query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor, cum_k: Tensor
) -> None:
    """What csrc/flash_attn/flash_api.cpp checks."""
    for each in (query, key, value):
        assert each.dtype in (torch.bfloat16, torch.float16), "only fp16 and bf16"
        assert each.dtype == query.dtype, (
            "query, key and value must have the same dtype"
        )
        assert each.ndim == 3
        assert each.stride(-1) == 1, "must have contiguous last dimension"
    size = query.shape[2]
    assert size <= 256
    assert size % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    assert key.shape == value.shape
    for cum, tokens in ((cum_q, len(query)), (cum_k, len(key))):
        assert cum.dtype == torch.int32, "cu_seqlens must have dtype int32"
        assert cum.is_contiguous()
        assert cum[-1] == tokens, "tokens that nobody would compute"
    assert cum_q.shape == cum_k.shape


def sequences(cum_q: Tensor, cum_k: Tensor, most_q: int, most_k: int) -> Iterator[Any]:
    ends_q, ends_k = cum_q.tolist(), cum_k.tolist()
    for i in range(len(ends_q) - 1):
        of_q, of_k = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        assert 0 < of_q.stop - of_q.start <= most_q
        assert 0 < of_k.stop - of_k.start <= most_k
        yield i, of_q, of_k


def kept(shape: Any, p: float, seed: int) -> Tensor:
    """Factors of dropout: the same for the same seed."""
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (numbers >= p).float() / (1 - p)


def probabilities(
    query: Tensor, key: Tensor, scale: float, causal: bool, left: int, right: int
) -> Tensor:
    """Of one sequence, in fp32: (heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    n, m = scores.shape[1:]
    # aligned at their ends
    distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    right = 0 if causal else right
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -torch.inf)
    if right >= 0:
        scores = scores.masked_fill(distance > right, -torch.inf)
    return scores.softmax(-1)


def wide(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor, cum_k: Tensor, most_q: int,
    most_k: int, p: float, causal: bool, _: bool, *, scale: float | None = None,
    window_size_left: int = -1, window_size_right: int = -1,
) -> Any:  # fmt: skip
    check(query, key, value, cum_q, cum_k)
    calls.append("forward")
    heads, scale = query.shape[1], scale or query.shape[2] ** -0.5
    causal = causal and most_q > 1
    seed = torch.randint(2**31, (1,)) if p else torch.zeros(1, dtype=torch.int64)
    output = torch.full(query.shape, torch.nan, dtype=query.dtype)
    for i, of_q, of_k in sequences(cum_q, cum_k, most_q, most_k):
        k, v = wide(key[of_k], heads), wide(value[of_k], heads)
        found = probabilities(
            query[of_q].float(), k, scale, causal, window_size_left, window_size_right
        )
        found = found * kept(found.shape, p, int(seed) + i)
        output[of_q] = torch.einsum("hqk,khd->qhd", found, v).to(query.dtype)
    return output, torch.empty(heads, len(query)), seed, torch.empty(0), torch.empty(0)


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, _: Tensor, __: Tensor,
    cum_q: Tensor, cum_k: Tensor, most_q: int, most_k: int, p: float, causal: bool, seed: Tensor,
    ___: Tensor, *, scale: float | None = None, window_size_left: int = -1,
    window_size_right: int = -1,
) -> Any:  # fmt: skip
    check(query, key, value, cum_q, cum_k)
    calls.append("backward")
    heads, shared, scale = query.shape[1], key.shape[1], scale or query.shape[2] ** -0.5
    causal = causal and most_q > 1
    d_query, d_key, d_value = (
        torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (query, key, value)
    )
    for i, of_q, of_k in sequences(cum_q, cum_k, most_q, most_k):
        q, k, v = query[of_q].float(), wide(key[of_k], heads), wide(value[of_k], heads)
        found = probabilities(q, k, scale, causal, window_size_left, window_size_right)
        factors, d_out = kept(found.shape, p, int(seed) + i), gradient[of_q].float()
        d_found = torch.einsum("qhd,khd->hqk", d_out, v) * factors
        d_scores = found * (d_found - (d_found * found).sum(-1, keepdim=True)) * scale
        d_query[of_q] = torch.einsum("hqk,khd->qhd", d_scores, k).to(query.dtype)
        of_key = torch.einsum("hqk,qhd->khd", d_scores, q)
        of_value = torch.einsum("hqk,qhd->khd", found * factors, d_out)
        for whole, part in ((d_key, of_key), (d_value, of_value)):
            split = part.view(len(part), shared, heads // shared, -1)
            whole[of_k] = split.sum(2).to(whole.dtype)
    return d_query, d_key, d_value


@contextlib.contextmanager
def as_on_an_h100(
    monkeypatch: pytest.MonkeyPatch, multiple: int = 16
) -> Iterator[None]:
    """CPUs take the path of a GPU of sm_90; numbers of tokens are multiples of a small number."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(
        torch.backends.cuda, "is_flash_attention_available", lambda: True
    )
    own, gpu = packed_attention.why_no_flash, torch.device("cuda:0")
    monkeypatch.setattr(
        packed_attention, "why_no_flash", lambda _, *rest: own(gpu, *rest)
    )
    monkeypatch.setattr(packed_attention, "token_multiple", lambda _: multiple)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        calls.clear()
        yield
