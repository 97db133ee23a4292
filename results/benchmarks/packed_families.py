"""What do batches without padding save for models of today? One model of random weights, in bf16
on a CPU; the same samples of MRPC packed, and padded to the longest, as transformers computes them.

    python results/benchmarks/packed_families.py modernbert MRPC_DIR VOCABULARY
    python results/benchmarks/packed_families.py deberta MRPC_DIR VOCABULARY --layers 4

MRPC_DIR holds train.jsonl, VOCABULARY is BERT's vocab.txt. Steps in turn, forward, backward and
AdamW, each in CPU seconds of the process; so on a busy machine the ratio holds, too.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from harness import confidence, parser, save

WARM_UP = 2
FAMILIES = {
    "modernbert": "ModernBert",
    "deberta": "DebertaV2",
    "mpnet": "MPNet",
    "gte": "Gte",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "deberta": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
        "position_biased_input": False, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "type_vocab_size": 0, "max_relative_positions": -1,
    },
}  # fmt: skip
"""The base model of each family is what its configuration is by default, or with these."""


def main(family: str, data: Path, vocabulary: Path, asked: Any) -> None:
    import numpy as np
    import torch
    import transformers
    from tokenizers import BertWordPieceTokenizer

    from slurmft.train.data.tables import Batch, TokenTable
    from slurmft.train.engine import packing

    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    tokenizer = BertWordPieceTokenizer(str(vocabulary))
    lines = (data / "train.jsonl").read_text().splitlines()
    pairs = [(row["sentence1"], row["sentence2"]) for row in map(json.loads, lines)]
    encoded = [each.ids for each in tokenizer.encode_batch(pairs)]
    table = TokenTable.build(encoded, [json.loads(line)["label"] for line in lines])
    options = {"num_hidden_layers": asked.layers} if asked.layers else {}
    config = getattr(transformers, f"{FAMILIES[family]}Config")(
        **OPTIONS.get(family, {}), **options
    )
    config.pad_token_id = 0
    model = getattr(transformers, f"{FAMILIES[family]}ForSequenceClassification")(
        config
    )
    packed = packing.pack(model.train())
    assert isinstance(packed, packing.Packing), packed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch: Batch) -> float:
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**batch.inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float(), batch.targets["labels"]
        )
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - began

    order, found, tokens = np.random.default_rng(0).permutation(len(table)), [], []
    for number in range(WARM_UP + asked.steps):
        samples = order[number * asked.batch_size : (number + 1) * asked.batch_size]
        batches = table.batch(samples, 0), table.packed(samples)
        packed.expect(batches[1].lengths, torch.device("cpu"))
        seconds = [0.0, 0.0]
        # with padding, it is transformers' own
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[which] = step(batches[which])
        print(f"padded {seconds[0]:.2f} s, packed {seconds[1]:.2f} s", flush=True)
        if number >= WARM_UP:
            found.append(seconds)
            tokens.append([batch.padded_tokens for batch in batches])
    ratios = [padded / own for padded, own in found]
    padding = statistics.mean(padded / real for padded, real in tokens)
    low, high = confidence(ratios)
    print(
        f"{family}: {statistics.median(ratios):.2f} times [{low:.2f}, {high:.2f}] as fast; ",
        end="",
    )
    print(f"padded tokens for each real one: {padding:.2f}")
    save(f"packed_families_{family}", {
        "layers": config.num_hidden_layers, "batch_size": asked.batch_size,
        "parameters": sum(p.numel() for p in model.parameters()), "threads": asked.threads,
        "padded_and_packed_cpu_s": found, "padded_and_real_tokens": tokens,
        "ratio": statistics.median(ratios), "interval_95": [low, high],
    })  # fmt: skip


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("family", choices=FAMILIES)
    arguments.add_argument("data", type=Path, metavar="MRPC_DIR")
    arguments.add_argument("vocabulary", type=Path, metavar="VOCABULARY")
    arguments.add_argument("--layers", type=int, help="default: all of the base model")
    arguments.add_argument("--batch-size", type=int, default=32)
    arguments.add_argument("--steps", type=int, default=8, help="that count")
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = arguments.parse_args()
    main(given.family, given.data.absolute(), given.vocabulary.absolute(), given)
