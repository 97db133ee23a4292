"""Prints Kubernetes manifests. They are the manifest of a Kubeflow job, its Dockerfile and the
commands to deploy, watch and delete it; --output writes them as files.

examples:
  slurmft render kubernetes --image example.com/slurmft:1 --claim runs --nodes 4 \\
      --cpu 32 --memory 128Gi --task emotion --secret hub --output deploy
  slurmft render kubernetes --image example.com/slurmft:1 --claim runs --nodes 4 \\
      --backend ccl --env CCL_WORKER_COUNT=2 --setup "ulimit -n 65536" --recipe spr-squad
  slurmft render kubernetes --kind trainjob --image example.com/slurmft:1 --claim runs
  slurmft render kubernetes --image example.com/mine:1 --claim runs --nodes 4 \\
      -- /app/train.py --epochs 3
"""

import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, Part, count, run_part, typed_options, whole
from slurmft.cluster.submit import provenance
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit
from slurmft.core.files import named_by_user, write_text
from slurmft.core.options import build, options
from slurmft.plugins.kubernetes import manifests
from slurmft.programs import submission
from slurmft.programs.description import FLAGS, OwnProgram
from slurmft.train import recipes
from slurmft.train.config import TrainConfig
from slurmft.train.login.sources import check_given

ELSEWHERE = Elsewhere.PLAIN

_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH

_ON_PODS = [
    name for name, each in options(JobConfig).items() if "render" in each.commands
]
"""Options of a job that mean something on Kubernetes."""
_IN_IMAGE = [name for name, each in FLAGS.items() if "render" in each.commands]
"""Options of a program of the user's own there: its code and environment are the image's."""


_WITH_DEFAULTS = (
    "kind",
    "namespace",
    "shm",
    "min_nodes",
    "node_selector",
    "secret",
    "variables",
    "image_pull_policy",
)
"""Flags of this command alone that few clusters need: a short help leaves them out."""


def kubernetes_parser() -> Parser:
    command = Parser("slurmft render kubernetes", __doc__)
    # Of this command alone: the configuration of a run has none of them.
    add = command.add_argument_group("the cluster").add_argument
    _add_job_flags(add)
    _add_size_flags(add)
    _add_pod_flags(add)
    add("--output", type=Path, metavar="DIR", help="write files instead of printing")
    command.add_options(TrainConfig, "what to train")
    command.add_options(OwnProgram, "or a program of your own, after --", _IN_IMAGE)
    command.add_options(JobConfig, "how to run it", _ON_PODS)
    return command.show_usual(without=(*_IN_IMAGE, *_WITH_DEFAULTS))


def _add_job_flags(add: Callable[..., object]) -> None:
    """Adds the flags of the job itself: its kind, its name, and what of the cluster it uses."""
    add(
        "--kind",
        choices=manifests.KINDS,
        default="pytorchjob",
        help="of Kubeflow: PyTorchJob or TrainJob (default: pytorchjob)",
    )
    add(
        "--name",
        help="name of the job and of its run directory (default: slurmft-TASK)",
    )
    add(
        "--namespace",
        default="default",
        metavar="NAME",
        help="namespace (default: default)",
    )
    # Neither has a default that would work: both are of one's own cluster.
    add("--image", required=True, help="image with slurmft: registry/slurmft:tag")
    add(
        "--claim",
        required=True,
        metavar="NAME",
        help="PersistentVolumeClaim for the runs",
    )


def _add_size_flags(add: Callable[..., object]) -> None:
    """Adds the flags of what each pod gets, and of how few pods will do."""
    # Each amount is both the request and the limit of a pod: see manifests.yaml.jinja.
    add(
        "--cpu",
        type=count,
        default=8,
        metavar="N",
        help="CPUs of each pod (default: 8)",
    )
    add(
        "--memory",
        default="32Gi",
        metavar="SIZE",
        help="memory of each pod (default: 32Gi)",
    )
    add(
        "--gpus",
        type=whole,
        default=0,
        metavar="N",
        help="GPUs of each pod (default: 0)",
    )
    add(
        "--shm",
        default="4Gi",
        metavar="SIZE",
        help="/dev/shm, out of --memory (default: 4Gi)",
    )
    add(
        "--min-nodes",
        type=count,
        metavar="N",
        help="fewest pods to run with (pytorchjob)",
    )


def _add_pod_flags(add: Callable[..., object]) -> None:
    """Adds the flags of where pods run, and of what their containers find there."""
    add(
        "--node-selector",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="label of the nodes to use; repeatable",
    )
    add(
        "--secret",
        metavar="NAME",
        help="Secret whose keys become variables, such as HF_TOKEN",
    )
    add(
        "--env",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the pods; repeatable",
    )
    add(
        "--image-pull-policy",
        choices=manifests.PULL_POLICIES,
        help="when nodes pull the image (default: Kubernetes' own: always for the tag latest, "
        "else where it is not present)",
    )


def configure_pods(
    flags: dict[str, Any],
    words: list[str],
    argv: list[str],
) -> RunConfig:
    """Returns the configuration of pods: paths are theirs, and a site's Slurm defaults are not."""
    if words:
        # A program of the user's own need not tell that it is alive: no hang can be seen.
        values = {"hang_timeout_s": 0} | flags  # a flag of the user's takes precedence
        program = submission.in_image(words, flags)
    else:
        values = recipes.fill(flags)
        train = build(TrainConfig, values)
        # Here, not in the pods: whoever renders is there to mend a mistake.
        check_given(train)
        program = train.program()
    job = build(JobConfig, values | {"runs_dir": manifests.RUNS})
    return RunConfig(program=program, job=job, submission=provenance("render", argv))


def kubernetes_main(argv: list[str]) -> int:
    """`slurmft render kubernetes`: prints the files, or writes them."""
    # What follows "--" is the program's command line, whose flags are not ours to parse.
    end = len(argv)
    if "--" in argv:
        end = argv.index("--")
    program = argv[end + 1 :]
    arguments = kubernetes_parser().parse(argv[:end])
    option_names = [*options(TrainConfig), *FLAGS, *_ON_PODS]
    flags = typed_options(arguments, option_names)
    config = configure_pods(flags, program, ["kubernetes", *argv])
    # Only now: without a name, it is that of the task, which the configuration knows.
    if not arguments.name:
        arguments.name = manifests.dns_name(f"slurmft-{config.program.name}")
    manifests.check(arguments, config.job.nodes)
    commands = manifests.commands(arguments)
    output = arguments.output
    # The commands are in the file, too: who finds it later sees how it was deployed.
    manifest = _commented(commands) + manifests.manifest(config, arguments)
    if output is None:
        # All but the manifest as comments: the output as a whole can be piped to kubectl.
        image = ["--output DIR writes this and its Dockerfile, which is:"]
        image += manifests.dockerfile(config, arguments).splitlines()
        image.append("")
        print(_commented(image) + manifest.rstrip())
        _warn_of_readers()
        return Exit.OK
    output.mkdir(parents=True, exist_ok=True)
    place = named_by_user(output / "Dockerfile").parent
    manifest_name = f"{arguments.name}.yaml"
    # Whoever has its Secret executes code in the pods.
    write_text(place / manifest_name, manifest, is_private=True)
    write_text(place / "Dockerfile", manifests.dockerfile(config, arguments))
    print(f"written to {output}: {manifest_name}, Dockerfile")
    print("\n".join(commands))
    return Exit.OK


def _warn_of_readers() -> None:
    """Warns where the manifest, with its Secret, goes into a file that others can read."""
    try:
        status = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):  # it is no file
        return
    if stat.S_ISREG(status.st_mode) and status.st_mode & _OTHERS_READ:
        print(
            "warning: others can read the file that takes the manifest: with its Secret they "
            "execute code in the pods",
            "hint: --output DIR writes files that are yours alone; else chmod 600 it now, and "
            "keep it out of git",
            sep="\n",
            file=sys.stderr,
        )


def _commented(lines: Sequence[str]) -> str:
    """Returns lines as comments of YAML."""
    return "".join(f"# {line}\n" for line in lines)


PARTS = {"kubernetes": Part(kubernetes_parser, kubernetes_main)}


def main(argv: list[str]) -> int:
    return run_part("slurmft render", PARTS, argv, __doc__)
