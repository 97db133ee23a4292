"""Submits a training job. It fine-tunes a transformer on the nodes of a Slurm cluster, or on this
machine.

examples:
  slurmft submit --nodes 2 --follow                     synthetic data, a minute on two cores
  slurmft submit --nodes 4 --task emotion --follow      emotion from the hub, on 4 nodes
  slurmft submit --nodes 4 --task emotion --data /gpfs/emotion --model /gpfs/distilbert \\
      --partition gpu --gpus-per-node 4 --time 30 --setup "module load cuda"
  slurmft submit --nodes 4 --recipe spr-squad --follow  a published setting
  slurmft submit --nodes 4 --container /gpfs/images/torch.sif --follow
  slurmft submit --container nvcr.io#nvidia/pytorch:25.01-py3 --container-runtime pyxis
  slurmft submit --cluster mpirun --hostfile hosts --nodes 4 --nproc-per-node 2 --follow
  slurmft submit --nodes 4 --dry-run                    show what would be submitted

Defaults of your site go to ~/.config/slurmft/site.toml (slurmft help sites):
  partition = "gpu"
  gpus_per_node = 4
  setup = ["module load cuda"]
"""

import sys

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, typed_options
from slurmft.cli.submission import submit_or_show
from slurmft.core.config import JobConfig
from slurmft.train.config import TrainConfig

ELSEWHERE = Elsewhere.SUBMITS | Elsewhere.SENDS_TASK


def parser() -> Parser:
    command = Parser("slurmft submit", __doc__).add_submission()
    command.add_options(TrainConfig, "what to train").add_options(
        JobConfig, "where to run it"
    )
    return command.show_usual()


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    # --help need not wait for it
    from slurmft.train.login import fitting_sizes
    from slurmft.train.login.configure import OPTIONS, configure

    config = configure(typed_options(arguments, OPTIONS))
    # To stderr, so that --json and --dry-run stay what they are.
    for note in fitting_sizes.notes(config):
        print(f"note: {note}", file=sys.stderr)
    return submit_or_show(config, arguments, "submit", argv, OPTIONS)
