"""The files of a model on this machine."""

from pathlib import Path

from slurmft.core.hub import hub_cache, is_local


def folders_of(model: str) -> list[Path]:
    """Returns the folder of a model, or those of its revisions in the hub's cache."""
    if is_local(model):
        return [Path(model)]
    folder_name = model.replace("/", "--")
    cached = hub_cache() / f"models--{folder_name}" / "snapshots"
    try:
        return sorted(cached.glob("*"))
    except PermissionError:  # the job says what is closed to it
        return []


def tokenizer_file(model: str) -> Path | None:
    """Returns the file of a model's tokenizer, in its folder or the hub's cache; None: there is
    none."""
    # Of several revisions any will do: it only estimates lengths.
    for folder in reversed(folders_of(model)):
        file = folder / "tokenizer.json"
        if file.is_file():
            return file
    return None
