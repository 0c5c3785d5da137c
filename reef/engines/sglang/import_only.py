"""Packages that SGLang imports wherever it runs, and calls only on a GPU: here they can be imported, not used.

The stubs in `stubs/` are made of this. They are put before a server's other packages on machines without a GPU, and
nowhere else: nothing in this service imports them.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class Missing(type):
    """What any name of such a package is: a class, to annotate and derive with. Calling or indexing it raises."""

    def __getattr__(cls, name: str) -> "Missing":
        return _attribute(cls, f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *_arguments: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__qualname__} was used, and here it is an import stub of Reef's for machines "
            "without a GPU. Either SGLang was told to use a kernel that needs one (see inference.options), or it knows "
            "no other"
        )

    __getitem__ = __call__

    def __contains__(cls, _key: Any) -> bool:
        return False  # torch asks `"cpu" in triton.backends.backends`


class MissingModule(ModuleType):
    """A module of such names."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # it is a package too: anything can be imported from below it

    def __getattr__(self, name: str) -> Missing:
        return _attribute(self, self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Finds every module below a package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def stub(package: str) -> None:
    """Turn a module that is being imported into a stub: its other names, and the modules below it, are Missing."""
    sys.modules[package].__class__ = MissingModule
    sys.meta_path.append(_Finder(package))  # last: what a stub has of its own comes first


def missing(module: str, name: str) -> Missing:
    """A name that is not there."""
    made = Missing(name.rpartition(".")[2], (), {})
    made.__module__, made.__qualname__ = module, name
    return made


def _attribute(owner: Any, path: str, name: str) -> Missing:
    """One object for one name, however often it is asked for; Python's own protocols find nothing."""
    if name.startswith("__"):
        raise AttributeError(f"the import stub {path} has no {name}")
    made = missing(path, name)
    setattr(owner, name, made)
    return made
