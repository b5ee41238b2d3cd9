"""The module that ``optimize`` gives: the user's own module, with another forward."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import nn

from dsa_compile.call_inputs import CallSignature, flatten
from dsa_compile.errors import ConfigError, GradientError, TrainingModeError

if TYPE_CHECKING:
    from dsa_compile.report import Report
    from dsa_compile.session import Session

Host = Callable[..., Any]


class Engine:
    """What an optimised module runs in place of its forward.

    Attributes:
        model: the user's module.
        session: the captured graphs.
        host: runs a call on them.
        forward: checks a call, then runs it; has the signature of the model's forward.
    """

    def __init__(
        self, model: nn.Module, session: Session, host: Host, notes: Callable[[], tuple[str, ...]]
    ) -> None:
        self.model = model
        self.session = session
        self.host = host
        self._notes = notes
        self._signature = CallSignature.of(model)

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        self.forward = forward

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimised model without gradients.

        Raises:
            TrainingModeError: the model or a submodule is in training mode.
            GradientError: gradients are on and an input asks for them.
            NoMatchError: the call's graphs hold fewer indexers than ``require_match`` asks for.
            InputError: the capture from example inputs does not serve the call.
        """
        check_mode(self.model)
        check_gradients(self._signature, args, kwargs)
        self.session.ran = set()
        with torch.no_grad():
            result = self.host(*args, **kwargs)
        self.session.judge(self.session.ran)
        return result

    def report(self) -> Report:
        """The report on every graph captured so far."""
        return self.session.report(self._notes())


class OptimizedModule(nn.Module):
    """A module optimised by ``optimize``; also an instance of the original's class.

    It shares the original's attributes, all of them: parameters, buffers, hooks, configuration.
    What is set on one is seen on the other. Only ``forward`` differs, so that methods of the
    model that call the model (``generate`` and the like) run the optimised form.
    """

    __slots__ = ()
    _dsa_engine: Engine

    @property
    def report(self) -> Report:
        """What was found and done, on all graphs captured so far."""
        return self._dsa_engine.report()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an optimised module cannot be copied or pickled; copy the original and optimise the "
            "copy, or save its state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(2)


def wrap(engine: Engine) -> OptimizedModule:
    """The optimised module of an engine."""
    model = engine.model
    kind = type(model)

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__slots__"] = ("_dsa_engine",)
        namespace["__module__"] = kind.__module__
        namespace["__doc__"] = kind.__doc__
        # A property goes before a forward that was set on the instance.
        namespace["forward"] = property(lambda self: self._dsa_engine.forward)

    made = types.new_class(f"Optimized{kind.__name__}", (OptimizedModule, kind), exec_body=fill)
    module: OptimizedModule = object.__new__(made)
    object.__setattr__(module, "__dict__", model.__dict__)
    object.__setattr__(module, "_dsa_engine", engine)
    return module


def engine_of(module: nn.Module) -> Engine | None:
    """The engine of an optimised module, None of any other."""
    return module._dsa_engine if isinstance(module, OptimizedModule) else None


def original_of(module: object, argument: str = "model") -> nn.Module:
    """The plain module behind ``module``.

    Raises:
        TypeError: ``module`` is no module.
        ConfigError: it is a scripted module, or was compiled by other means.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{argument} must be a torch.nn.Module, got {type(module).__name__}")
    if (engine := engine_of(module)) is not None:
        return engine.model
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"{argument} is a scripted module; pass the plain module")
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
        raise ConfigError(
            f"{argument} was compiled with torch.compile; pass the module as it was before"
        )
    return module


def check_mode(model: nn.Module) -> None:
    """Raise TrainingModeError if the model or one of its submodules is in training mode."""
    for name, module in model.named_modules():
        if module.training:
            where = f"submodule {name} of the model" if name else "the model"
            raise TrainingModeError(
                f"{where} is in training mode; call model.eval() first: optimised models only "
                "run forward"
            )


def check_gradients(
    signature: CallSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise GradientError, naming the input, if gradients are on and an input asks for them."""
    if not torch.is_grad_enabled() or not any(
        isinstance(value, torch.Tensor) and value.requires_grad
        for value in pytree.tree_leaves((args, kwargs))
    ):
        return
    names, values, _ = flatten(signature.bind(args, kwargs))
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise GradientError(
                f"input {name} requires gradients; optimised models only run forward: detach it, "
                "or call under torch.no_grad()"
            )
