"""What the built-in program does on the way of a job, and about its files."""

import functools

from slurmft.core.hooks import Hooks, SharedCache


class Training(Hooks):
    """Says where runs keep their tokens for each other."""

    def shared_cache(self) -> SharedCache:
        # Not above: of all commands only the clean-up, and a run on a full disk, ask for it.
        from slurmft.train import token_cache

        folder = token_cache.folder()
        return SharedCache(folder, functools.partial(token_cache.unused, folder))
