"""What the ranks of `test_communication.py` do; started by torchrun with two processes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator

from slurmft.job import process_group
from slurmft.job.process_group import World
from slurmft.train.config import TrainConfig
from slurmft.train.parallel.choice import choose_strategy

WORDS = 9000
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40,
}  # fmt: skip


def make() -> Any:
    """A BERT whose table of words is large: 1.1 MiB."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=3)
    return transformers.BertForSequenceClassification(config).eval()  # no dropout


def batch(seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, WORDS, (4, 12), generator=random)
    return {"input_ids": tokens, "labels": torch.arange(4) % 3}


class Rank:
    """One rank's training, as the loop does it."""

    def __init__(
        self, world: World, asked: str, model: Any = None, precision: str = "fp32"
    ) -> None:
        self.strategy = choose_strategy(TrainConfig(grad_comm=asked), world, precision)
        self.accelerator = Accelerator(cpu=True)
        self.bare = model or make()
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-3)
        self.world, self.step_number = world, 0
        self.model = self.strategy.wrap(self.accelerator, self.bare, self.optimizer)

    def backward(self, micro_steps: int = 1) -> None:
        for number in range(micro_steps):
            seed = 100 * self.step_number + 10 * number + self.world.rank
            inputs = batch(seed)
            if number < micro_steps - 1:
                with self.accelerator.no_sync(self.model):
                    self.accelerator.backward(self.model(**inputs).loss)
            else:
                self.accelerator.backward(self.model(**inputs).loss)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        self.strategy.end_step(self.step_number)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            n: p.grad for n, p in self.bare.named_parameters() if p.grad is not None
        }

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.bare.parameters()])


def plain(model: Any, micro_steps: int, world: World) -> dict[str, torch.Tensor]:
    """Gradients that are sent as they are."""
    rank = Rank(world, "fp32", model)
    rank.backward(micro_steps)
    return rank.gradients()


def same_everywhere(world: World, tensor: torch.Tensor) -> bool:
    found = world.all_objects(tensor.numpy().tobytes().hex())
    return all(each == found[0] for each in found)


def check_means(world: World) -> None:
    """Two ranks' gradients are the means of their own, with and without accumulation."""
    for micro_steps in (1, 3):
        own = make()
        for number in range(micro_steps):
            own(**batch(10 * number + world.rank)).loss.backward()
        means = {}
        for name, parameter in own.named_parameters():
            assert parameter.grad is not None
            means[name] = parameter.grad / world.size
            dist.all_reduce(means[name])
        for name, gradient in plain(make(), micro_steps, world).items():
            torch.testing.assert_close(gradient, means[name], msg=name)


def check_infinite_gradients_reach_all(world: World) -> None:
    """A gradient scaler must see them on every rank."""
    for asked in ("fp32", "bf16"):
        rank = Rank(world, asked)
        if world.is_main:
            rank.bare.bert.embeddings.word_embeddings.weight.register_hook(
                lambda g: g * torch.inf
            )
            rank.bare.classifier.weight.register_hook(lambda g: g * torch.inf)
        rank.backward()
        for name in ("bert.embeddings.word_embeddings.weight", "classifier.weight"):
            assert not rank.gradients()[name].isfinite().all(), (asked, name)


def check_rounded(world: World) -> None:
    expected = plain(make(), 1, world)
    rank = Rank(world, "bf16")
    rank.backward()
    for name, gradient in rank.gradients().items():
        # of a sum whose parts are larger
        near = 0.01 * float(expected[name].abs().max())
        torch.testing.assert_close(
            gradient, expected[name], rtol=0, atol=near, msg=name
        )
    layer = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(rank.gradients()[layer], expected[layer])


def check_auto(world: World) -> None:
    """Gradients are rounded where the run computes in bf16."""
    for precision, expected in (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")):
        strategy = choose_strategy(TrainConfig(grad_comm="auto"), world, precision)
        assert strategy.sends == expected


def check_local(world: World) -> None:
    """Ranks go apart, and meet every third step, with the means of weights and moments."""
    rank = Rank(world, "local:3")
    for step in range(1, 8):
        before = rank.weights()
        rank.step()
        met = rank.strategy.is_synchronized_after(step)
        assert met == (step in (3, 6))
        assert same_everywhere(world, rank.weights()) == met
        moments = torch.cat(
            [s["exp_avg"].reshape(-1) for s in rank.optimizer.state.values()]
        )
        assert same_everywhere(world, moments) == met
        assert not torch.equal(before, rank.weights())
    start = before  # after step 6
    own = torch.stack(
        [torch.tensor(w) for w in world.all_objects(rank.weights().tolist())]
    )
    rank.strategy.synchronize()
    changes = own.mean(0) - start
    near = 0.02 * float((own - start).abs().max())  # of a sum whose parts are larger
    torch.testing.assert_close(rank.weights() - start, changes, rtol=0, atol=near)
    assert same_everywhere(world, rank.weights())


def check_local_accumulates(world: World) -> None:
    """A rank's gradients are those of its own micro-steps, and of no other rank's."""
    alone = make()
    for micro_step in range(3):
        alone(**batch(10 * micro_step + world.rank)).loss.backward()
    rank = Rank(world, "local:3")
    rank.backward(micro_steps=3)
    for name, parameter in alone.named_parameters():
        assert torch.equal(rank.gradients()[name], parameter.grad), name


if __name__ == "__main__":
    world = process_group.init("gloo")
    check_means(world)
    check_infinite_gradients_reach_all(world)
    check_rounded(world)
    check_auto(world)
    check_local(world)
    check_local_accumulates(world)
    process_group.leave()
    # in one write: torchrun starts python -u
    print(f"rank {world.rank} done\n", end="")
    os._exit(0)  # as ranks do: threads of the process group may not end in order
