"""One node that needs a file of the hub: `hub_on_node.py KIND HF_HOME`, beside others like it.

It has a hub of its own, which counts. Waits for a line on stdin, so that all begin at once.
Prints JSON: how often it fetched the file, and whether that is whole.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.support import evaluate_on_nodes, hub

FILE = "model.safetensors"
CONTENT = bytes(range(256)) * 2**14  # 4 MiB


def main(kind: str, home: str) -> None:
    os.environ["HF_HOME"] = home
    with (
        tempfile.TemporaryDirectory() as folder,
        hub.Hub(Path(folder), pause_s=1.5) as source,
    ):
        (Path(folder) / FILE).write_bytes(CONTENT)
        os.environ["HF_ENDPOINT"] = source.url()
        import huggingface_hub

        evaluate_on_nodes.use_locks(kind)
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            found = Path(huggingface_hub.hf_hub_download(hub.NAME, FILE)).read_bytes()
            problem = None if found == CONTENT else "the file is damaged"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"fetched": source.fetched[FILE], "problem": problem}))


if __name__ == "__main__":
    main(*sys.argv[1:])
