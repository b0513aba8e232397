"""Send a function to another process by what it is, not by where it stands.

pickle sends a function as a name to import, which a notebook's cell has not got. Here a function
goes as its code, with the globals that it uses and the variables that it closes over; so do other
functions and plain classes of the same notebook or file. Modules and whatever can be imported go by
name. `pickle.loads` rebuilds it on the other side, in the same version of Python.
"""

import builtins
import dis
import functools
import importlib
import io
import marshal
import pickle
import sys
import types


class CannotSend(TypeError):
    """Something that the function uses cannot leave this process; `args[0]` says what."""


def dumps(function):
    """Return the function as bytes for `pickle.loads`.

    >>> factor = 3
    >>> pickle.loads(dumps(lambda x: factor * x))(14)
    42

    Raises CannotSend with the name of the global that is the reason.
    """
    home = {"__main__", getattr(function, "__module__", None)} - {__name__}
    try:
        return _dumps(function, home)
    except Exception as error:
        for name, value in _used_globals(function).items():
            try:
                _dumps(value, home)
            except Exception as cause:
                raise CannotSend(f"{name} ({type(value).__name__}): {cause}") from None
        raise CannotSend(str(error)) from None


def _dumps(value, home):
    file = io.BytesIO()
    _Pickler(file, home).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file, home):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.home = home

    def reducer_override(self, value):
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.FunctionType) and self._by_value(value):
            code = marshal.dumps(value.__code__)
            arguments = code, value.__name__, value.__defaults__, value.__closure__
            used = _used_globals(value)
            state = used, _used_submodules(value, used), value.__kwdefaults__, value.__dict__
            return _make_function, arguments, state, None, None, _fill_function
        if isinstance(value, type) and self._by_value(value):
            arguments = type(value), value.__name__, value.__bases__
            return _make_class, arguments, _attributes(value), None, None, _fill_class
        if isinstance(value, types.CellType):
            return _make_cell, (), _contents(value), None, None, _fill_cell
        if isinstance(value, staticmethod | classmethod):
            return type(value), (value.__func__,)
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel)
        if isinstance(value, functools._lru_cache_wrapper):
            return _make_cached, (value.__wrapped__, value.cache_parameters())
        return NotImplemented

    def _by_value(self, value):
        if value.__module__ in self.home:
            return True
        found = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is not value


def _used_globals(function):
    """The globals that a function and the functions inside it name, where they exist."""
    if not isinstance(function, types.FunctionType):
        return {}
    names = {
        instruction.argval
        for code in _codes(function)
        for instruction in dis.get_instructions(code)
        if instruction.opname.endswith("_GLOBAL")
    }
    known = function.__globals__
    return {name: known[name] for name in sorted(names) if name in known}


def _used_submodules(function, used_globals):
    """Modules such as `os.path` behind a global `os`: importing `os` alone need not bring them."""
    names = {name for code in _codes(function) for name in code.co_names}
    packages = [v.__name__ + "." for v in used_globals.values() if isinstance(v, types.ModuleType)]
    return [
        module
        for module in list(sys.modules)
        for package in packages
        if module.startswith(package) and names.issuperset(module[len(package) :].split("."))
    ]


def _codes(function):
    """The code of a function and of all functions inside it."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return codes


def _make_function(code, name, defaults, closure):
    code = marshal.loads(code)
    return types.FunctionType(code, {"__builtins__": builtins}, name, defaults, closure)


def _fill_function(function, state):
    used_globals, submodules, function.__kwdefaults__, attributes = state
    for name in submodules:
        importlib.import_module(name)
    function.__globals__.update(used_globals)
    function.__dict__.update(attributes)


def _make_cell():
    return types.CellType()


def _contents(cell):
    try:
        return (cell.cell_contents,)
    except ValueError:  # a variable that has no value yet
        return ()


def _fill_cell(cell, contents):
    for value in contents:
        cell.cell_contents = value


def _attributes(cls):
    # Made anew with the class, or, of a dataclass, full of markers that must not be copied.
    left_out = ("__dict__", "__weakref__", "__slots__", "__dataclass_fields__")
    left_out += ("__dataclass_params__",)
    return {name: value for name, value in vars(cls).items() if name not in left_out}


def _make_class(metaclass, name, bases):
    return metaclass(name, bases, {})


def _fill_class(cls, attributes):
    for name, value in attributes.items():
        setattr(cls, name, value)


def _make_cached(function, parameters):
    return functools.lru_cache(**parameters)(function)
