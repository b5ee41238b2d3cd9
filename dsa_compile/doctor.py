"""What a machine can serve, and what is missing for the rest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dsa_compile.config import PROVIDERS
from dsa_compile.errors import Need
from dsa_compile.host_compiler import compiler_needs
from dsa_compile.target import PACKAGES, Target

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class Examination:
    """A target, what each provider lacks on it, and what packages lack on this machine.

    Where nothing is lacking, a provider or the compiler of packages is ready.
    """

    target: Target
    needs: dict[str, tuple[Need, ...]]
    compiler: tuple[Need, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: target, device, packages, the needs of each provider and of packaging."""
        providers = {name: [asdict(n) for n in needs] for name, needs in self.needs.items()}
        return {
            "target": self.target.name,
            "device": self.target.device,
            "packages": {name: self.target.packages.get(name) for name in PACKAGES},
            "providers": providers,
            "packaging": [asdict(need) for need in self.compiler],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        from dsa_compile.report import plain_table

        device = f" ({self.target.device})" if self.target.device else ""
        yield Text(f"target {self.target.name}{device}", style="bold")
        packages = plain_table(("package", "version"), (), ())
        for name in PACKAGES:
            packages.add_row(name, self.target.packages.get(name, "not installed"))
        yield packages
        table = plain_table(("provider", "state", "mend"), ("state", "mend"), ())
        packaging = {"C++ compiler of packages": self.compiler}
        for name, needs in {**self.needs, **packaging}.items():
            if not needs:
                table.add_row(name, Text("ready", style="green"), "")
            for at, need in enumerate(needs):
                table.add_row(name if at == 0 else "", need.what, need.mend)
        yield table


def examine(target: str | None = None) -> Examination:
    """Look at a target by name, or at the device that is found here.

    Raises:
        ConfigError: no such target is known.
    """
    chosen = Target.detect() if target is None else Target(target)
    names = [name for name in PROVIDERS if name != "auto"]
    needs = {name: chosen.needs(name) for name in names}
    return Examination(chosen, needs, tuple(compiler_needs()))
