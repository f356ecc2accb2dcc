"""Messages for mistakes in programs that Python and NumPy report, but cannot explain.

`Explaining` is the base of the classes that users create and derive from: layers, optimizers,
losses, metrics and callbacks. It remembers how each object was made, and knows nothing of any.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

T = TypeVar("T")

_INSTEAD = {
    "decay": "pass a schedule, such as learning_rate=optimizers.ExponentialDecay(...)",
    "gradient_accumulation_steps": "use optimizers.GradientAccumulation",
    "loss_scale_factor": "use optimizers.LossScale",
    "lr": "use learning_rate",
    "seed": "call nd.set_seed, which seeds all layers",
}
"""What to do instead of what Keras, or an older Keras, has by these names."""


def count_of(count: int, thing: str, things: str = "") -> str:
    """Return a number and a noun, in the plural unless the number is 1.

    >>> count_of(1, "replica"), count_of(2, "replica"), count_of(0, "boundary", "boundaries")
    ('1 replica', '2 replicas', '0 boundaries')
    """
    return f"{count} {thing if count == 1 else things or f'{thing}s'}"


class Explaining:
    """A base class that explains unknown arguments, and a forgotten ``super().__init__()``.

    An object remembers the arguments that created it, for `get_config`.

    >>> from ndistribute import optimizers
    >>> optimizers.SGD(lr=0.1)
    Traceback (most recent call last):
    TypeError: SGD takes no argument 'lr': use learning_rate.
    """

    _needs_init: ClassVar[bool] = True
    """Whether the constructor of the base class, which sets `name`, must run."""
    _uncalled: ClassVar[dict[str, str]] = {}
    """What others than this package may not define, as nothing calls it, and what to do instead."""
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made._arguments = args, kwargs
        return made

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that create an equal object, by name."""
        args, kwargs = self._arguments
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        config = dict(list(bound.arguments.items())[1:])
        for parameter in inspect.signature(type(self).__init__).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                config.update(config.pop(parameter.name))
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return a new object for what `get_config` returned; `load` calls this, too."""
        return cls(**config)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _explained(cls.__init__)  # type: ignore[method-assign]
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] != __name__.partition(".")[0]:
                cls._refuse_uncalled(vars(base))

    @classmethod
    def _refuse_uncalled(cls, names: Iterable[str]) -> None:
        """Raise a `TypeError` if something is defined that has no effect."""
        for name in names:
            instead = cls._instead_of(name)
            if instead is not None:
                raise TypeError(f"{cls.__name__}: nothing calls {name}: {instead}.")

    @classmethod
    def _instead_of(cls, name: str) -> str | None:
        """Return what to do instead of defining a name; None if it has an effect."""
        return cls._uncalled.get(name)

    if not TYPE_CHECKING:  # Else no attribute would be unknown.

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if self._needs_init and "name" not in vars(self) and not name.startswith("__"):
                raise RuntimeError(
                    f"{kind}.__init__ has not called super().__init__(): call it first."
                )
            if name in _INSTEAD:
                raise AttributeError(f"{kind} has no {name}: {_INSTEAD[name]}.")
            return object.__getattribute__(self, name)  # Raises Python's own error.


def _explained(init: Callable[..., None]) -> Any:
    """Return a constructor that names near arguments instead of an unknown one."""

    @functools.wraps(init)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in kwargs:
                raise
            kind, name = type(self), unknown[1]
            inits = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
            known = {each: None for init in inits for each in inspect.signature(init).parameters}
            near = [f"use {each}" for each in difflib.get_close_matches(name, known, 1)]
            hint = [_INSTEAD[name]] if name in _INSTEAD else near or [f"see help({kind.__name__})"]
            raise TypeError(f"{kind.__name__} takes no argument {name!r}: {hint[0]}.") from error

    return explained


def constructor(defaults: Mapping[str, Any], init: Callable[..., None]) -> Any:
    """Return a constructor that takes arguments of some names and defaults, and other keywords.

    Args:
        defaults: the defaults by name, in the order of the arguments.
        init: called with the object, and with everything else by keyword.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [inspect.Parameter(name, kind, default=defaults[name]) for name in defaults]
    options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    signature = inspect.Signature([inspect.Parameter("self", kind), *taken, options])

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807 - As errors call it.
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        init(arguments.pop("self"), **arguments.pop("options"), **arguments)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def accepting(*ignored: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator for a function that also takes keywords which change no result.

    TensorFlow has them for speed, for names or for files beside the result. Python refuses others.

    >>> @accepting("use_locking")
    ... def assign(value):
    ...     return value
    >>> assign(1.0, use_locking=True)
    1.0
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            if kwargs:
                kwargs = {name: kwargs[name] for name in kwargs if name not in ignored}
            return function(*args, **kwargs)

        return call

    return decorate


def explain_read_only(error: BaseException) -> None:
    """Add to NumPy's error for a write in place what is read-only, and what to do."""
    if isinstance(error, ValueError) and "read-only" in str(error):
        error.add_note(
            "arrays from a dataset or a variable are read-only, because other parts of the "
            "program use the same memory: change a copy, such as x = x.copy() or x = x * 2 instead "
            "of x *= 2."
        )
