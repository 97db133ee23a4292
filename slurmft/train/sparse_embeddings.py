"""Gradients of embedding tables, of which a step touches few rows."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TABLE_BYTES = 2**20
"""Smaller tables are sent whole: one more message would cost more than their rows save."""


class Tables:
    """Embedding tables whose gradients are summed row by row: those that any rank looked up.

    DDP leaves them out. Rows that nobody looked up have no gradient: nothing is lost.
    """

    def __init__(self, modules: dict[str, torch.nn.Embedding]) -> None:
        self.modules = modules
        """By the name of their weights."""
        self._looked_up = {
            name: torch.zeros(module.num_embeddings + 1, dtype=torch.uint8)
            for name, module in modules.items()
        }
        """1 for each row; the last: there are gradients elsewhere, too."""
        self._checked = False
        self._whole: set[str] = set()
        """Tables that are not only looked up: sent whole."""
        for name, module in modules.items():
            note = partial(_note, self._looked_up[name])
            module.register_forward_pre_hook(note, with_kwargs=True)

    @classmethod
    def of(cls, model: Any) -> "Tables":
        """The large tables of a model, which DDP then leaves out. A weight that two modules share
        (a head's, tied to its embedding) is not one of them."""
        tables = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if is_plain_table(model, module) and module.weight.nbytes >= _TABLE_BYTES
        }
        broadcast_weights(module.weight.data for module in tables.values())
        return cls(tables)

    def forget(self) -> None:
        for looked_up in self._looked_up.values():
            looked_up.zero_()

    @torch.no_grad()
    def sum(self, ranks: int) -> None:
        """Gradients become the means over all ranks, as DDP makes them."""
        if not self.modules:
            return
        if not self._checked:
            for name, module in self.modules.items():
                self._check(module, self._looked_up[name])
        maps = torch.cat(list(self._looked_up.values()))
        dist.all_reduce(maps, dist.ReduceOp.MAX)
        parts = torch.split(maps, [len(looked_up) for looked_up in self._looked_up.values()])
        for (name, module), union in zip(self.modules.items(), parts, strict=True):
            if union[-1]:
                self._whole.add(name)
            self._sum_rows(module, union[:-1].nonzero().squeeze(1), name in self._whole, ranks)
        self._checked = True
        self.forget()

    @staticmethod
    def _check(module: torch.nn.Embedding, looked_up: Tensor) -> None:
        """Marks a table that got gradients otherwise than by being looked up. Once, as it costs."""
        if module.weight.grad is not None:
            looked_up[-1] = bool(module.weight.grad[looked_up[:-1] == 0].any())

    @staticmethod
    def _sum_rows(module: torch.nn.Embedding, rows: Tensor, whole: bool, ranks: int) -> None:
        weight = module.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if whole or 2 * len(rows) > len(weight):
            dist.all_reduce(weight.grad.div_(ranks))
        elif len(rows):
            sent = weight.grad.index_select(0, rows).div_(ranks)
            dist.all_reduce(sent)
            weight.grad.index_copy_(0, rows, sent)


def _note(looked_up: Tensor, module: Any, args: Any, kwargs: Any) -> None:
    """A hook: which rows are looked up."""
    if torch.is_grad_enabled():
        looked_up[(args[0] if args else kwargs["input"]).reshape(-1)] = 1


def is_plain_table(model: Any, module: Any) -> bool:
    """Whether a table is trained, looked up as torch does it, and no other layer's weight."""
    return (
        isinstance(module, torch.nn.Embedding)
        and type(module).forward is torch.nn.Embedding.forward  # others compute their rows
        and module.weight.requires_grad
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
        and not is_shared(model, module)
    )


def is_shared(model: Any, module: Any) -> bool:
    """Whether a module's weight is also that of another one."""
    return sum(p is module.weight for _, p in model.named_parameters(remove_duplicate=False)) > 1


def broadcast_weights(tensors: Iterable[Tensor]) -> None:
    """The main rank's tensors, on every rank."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
