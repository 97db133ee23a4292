"""Lists or copies the files that come with slurmft. They are studies, published tables, batch
scripts and patches. With a folder, it copies them there, to be changed; files that are there
already stay as they are.

examples:
  slurmft examples                       # what there is
  slurmft examples slurmft-examples      # copies; then:
  sbatch slurmft-examples/sbatch/multi_node.sbatch --task emotion
"""

import textwrap
from pathlib import Path

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser
from slurmft.core import shipped
from slurmft.core.errors import Exit
from slurmft.core.text import counted

ELSEWHERE = Elsewhere.PLAIN


def parser() -> Parser:
    command = Parser("slurmft examples", __doc__)
    command.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="copy the files there"
    )
    return command


def main(argv: list[str]) -> int:
    folder = parser().parse(argv).folder
    if folder is not None:
        files = shipped.copy(folder)
        print(f"{counted(len(files), 'file')} written to {folder}")
        return Exit.OK
    for kind, purpose in shipped.KINDS.items():
        names = ", ".join(file.stem for file in shipped.files(kind))
        paragraph = textwrap.fill(names, 58)
        print(f"{kind}: {purpose}")
        print(textwrap.indent(paragraph, "  "))
    print("Next: slurmft examples DIR   # copies them")
    return Exit.OK
