"""Read the arguments of a call of an opaque op by the roles that its adapter declares."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from dsa_compile.passes.adapter import Adapter
from dsa_compile.passes.graph_tools import is_tensor
from dsa_compile.passes.score_trace import Refusal


def arguments(call: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    schema = call.target._schema  # type: ignore[union-attr]
    given: dict[str, Any] = {}
    for at, argument in enumerate(schema.arguments):
        held = argument.default_value if argument.has_default_value() else None
        given[argument.name] = call.args[at] if at < len(call.args) else held
    return {**given, **call.kwargs}


class GivenRoles:
    """What a call gives for each role of its adapter."""

    def __init__(self, call: fx.Node, adapter: Adapter) -> None:
        self.adapter = adapter
        self.by_name = arguments(call)

    def role(self, name: str) -> fx.Node:
        """The tensor that plays a role that must be there."""
        held = self.maybe(name)
        if held is None:
            raise Refusal(f"{self.adapter.op} is called without its {name}", 5)
        return held

    def maybe(self, name: str) -> fx.Node | None:
        """The tensor that plays a role, None where the call gives none."""
        argument = self.adapter.argument(name)
        if argument is None:
            return None
        held = self._lookup(argument)
        if held is not None and not is_tensor(held):
            raise Refusal(f"{argument} of {self.adapter.op} is no tensor, its role is {name}", 5)
        return held

    def number(self, given: float | str, name: str) -> Any:
        """A number that the adapter gives, or that an argument holds."""
        held = self._lookup(given) if isinstance(given, str) else given
        if isinstance(held, bool) or not isinstance(held, (int, float)):
            raise Refusal(f"{name} of {self.adapter.op} is no constant of the graph", 5)
        return held

    def _lookup(self, argument: str) -> Any:
        name, _, place = argument.partition(".")
        held = self.by_name[name]
        if not place:
            return held
        if not isinstance(held, (list, tuple)) or not place.isdigit() or int(place) >= len(held):
            raise Refusal(f"{self.adapter.op} is called without {argument}", 5)
        return held[int(place)]
