"""Lazy namespaces: a name is imported from its module when it is first used (PEP 562)."""

import sys
from importlib import import_module


def lazy_namespace(package, names_by_module, submodules=()):
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package that loads nothing itself.

    names_by_module: the public names that each module defines; its path is relative to the
        package, such as "collectives.cost". submodules: modules that are attributes themselves.
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}
    public = sorted([*module_of, *submodules])

    def __getattr__(name):
        if name in module_of:
            value = getattr(import_module(f"{package}.{module_of[name]}"), name)
            setattr(sys.modules[package], name, value)  # the next time it is found without us
            return value
        if name in submodules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__, lambda: public, public
