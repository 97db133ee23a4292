"""Changes to a library's module right after its import, whenever that is."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport:
    """Calls `then` with each of some modules before whoever imports it has it."""

    def __init__(
        self, names: Sequence[str], then: Callable[[ModuleType], None]
    ) -> None:
        self._names = names
        self._then = then
        # In front: the import system takes the first finder's answer.
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module whose import is followed by `then`; None for all others.

        The import system asks for every module.
        """
        if name not in self._names:
            return None
        # Not importlib.util.find_spec, which would ask this finder again. Those behind it, among
        # them others of its kind, which want the same module.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in behind)
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        # Each spec has a loader of its own: no other module is changed with this one.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
