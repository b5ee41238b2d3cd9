"""Prove that an opaque op computes what its adapter declares: run it beside its plain form."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dsa_compile.kernels.key_cache_reference import write_slots
from dsa_compile.kernels.quantise import quantise
from dsa_compile.passes.adapter import Adapter
from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.compare_adapter import AdapterComparison
from dsa_compile.passes.context import MatchOptions
from dsa_compile.passes.graph_tools import dtype_of, is_float, is_size, is_tensor, value
from dsa_compile.passes.read_arguments import GivenRoles
from dsa_compile.passes.run_probe import Draw, ProbeError, evaluate, memory, needed
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.spell_adapters import Spelled

_CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_BLOCKS = ("full", "holes", "twice", "prefix")
# How large operands are in turn: an op that cuts its scores off does so somewhere in between.
_SIZES = (1.0, 64.0, 1 / 64)


def prove_adapter(call: fx.Node, adapter: Adapter, spelled: Spelled, options: MatchOptions) -> str:
    """Run a call and its plain form on drawn arguments and compare.

    Returns:
        How it was proven, for the report.

    Raises:
        Refusal: they differ (with the counterexample), or the op cannot be run although it has a
            CPU kernel and the adapter does not vouch for it.
    """
    name = adapter.op
    target: Any = call.target
    if not any(
        target.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key)) for key in _CPU_KEYS
    ):
        return _contract(name, "it has no kernel for the CPU")
    prover = _Prover(call, adapter, spelled, options)
    try:
        rounds = prover.run()
    except _CannotRun as error:
        if adapter.contract:
            return _contract(name, f"it cannot be run on the CPU: {error}")
        raise Refusal(
            f"{name} cannot be run on the CPU ({error}); contract=True takes its adapter at its "
            "word",
            8,
        ) from None
    return f"{name} enters through its adapter, compared with its plain form on {rounds} probes"


def _contract(name: str, why: str) -> str:
    return f"{name} enters through its adapter by declared contract, no probe has run it: {why}"


class _CannotRun(Exception):
    """The op raised on the probe."""


class _Prover:
    def __init__(
        self, call: fx.Node, adapter: Adapter, spelled: Spelled, options: MatchOptions
    ) -> None:
        self.call, self.adapter, self.spelled, self.options = call, adapter, spelled, options
        self.given = GivenRoles(call, adapter)
        self.roles: dict[str, fx.Node] = {}
        for role, _ in adapter.roles:
            held = self.given.maybe(role) if role != "topk" else None
            if held is not None:
                self.roles[role] = held
        self.comparison = AdapterComparison(adapter, spelled, self.roles)
        self.generator = torch.Generator().manual_seed(options.seed + 3)

    def run(self) -> int:
        given = set(self.roles.values())
        visible = [] if self.spelled.visible is None else [self.spelled.visible]
        self.targets = [*self.spelled.outs.values(), *visible]
        cone = needed(self.targets, given)
        nodes = [n for n in [*cone, *given] if is_tensor(n) or is_size(n)]
        block = self.adapter.block_size
        if isinstance(block, str):
            held = self.given.by_name[block]
            block = held if isinstance(held, int) else 8
        bound = SizeBinder().bindings(nodes, self.spelled.score, at_least=3 * block + 1)
        if not bound:
            raise Refusal(f"no small sizes satisfy the guards around {self.adapter.op}", 5)
        size = memory(cone, bound[0])
        if size > self.options.probe_memory_bytes:
            raise Refusal(
                f"the static sizes of {self.adapter.op} need {size / 2**30:.1f} GiB to probe, more "
                "than the budget: make them dynamic or raise probe_memory_bytes",
                5,
            )
        rounds = 0
        for binding in bound:
            seen = False
            turns = max(self.options.draws, len(_BLOCKS))
            for turn in range(turns + self._heads(binding)):
                seen |= self._round(binding, turn, turn - turns)
                rounds += 1
            if not seen:
                raise Refusal(f"no probe of {self.adapter.op} showed a single value", 8)
        return rounds

    def _heads(self, binding: Binding) -> int:
        """Further rounds, so that every head has been alone in some row."""
        weights = self.roles.get("weights")
        query = self.roles.get("query")
        if weights is None or query is None:
            return 0
        *lead, heads, _ = binding.shape(query)
        rows = max(1, int(torch.tensor(lead).prod()))
        return -(-heads // rows)

    def _round(self, binding: Binding, turn: int, alone: int) -> bool:
        env = self._draw(binding, turn)
        if alone >= 0:
            query, weights = self.roles["query"], self.roles["weights"]
            heads = binding.shape(query)[-2]
            drawn = env[weights]
            flat = drawn.reshape(-1, heads)
            row = torch.arange(flat.shape[0])[:, None] + alone * flat.shape[0]
            only = torch.arange(heads) == row % heads
            env[weights] = torch.where(only, torch.ones_like(flat), 0).reshape(drawn.shape)
        try:
            new = evaluate(needed(self.targets, env), env, binding)
        except ProbeError as error:
            raise Refusal(
                f"the plain form of {self.adapter.op} cannot be run: {error}", 6
            ) from None
        old = self._opaque(env, binding)
        return self.comparison.shows(env, new, old, binding)

    # -- running ------------------------------------------------------------------------------

    def _opaque(self, env: dict[fx.Node, Any], binding: Binding) -> tuple[torch.Tensor, ...]:
        def held(node: fx.Node) -> Any:
            if node in env:
                return env[node].clone()
            if is_size(node):
                return binding.extent(value(node))
            return torch.zeros(binding.shape(node), dtype=dtype_of(node))

        def plain(arg: Any) -> Any:
            return torch.device("cpu") if isinstance(arg, torch.device) else arg

        args, kwargs = fx.map_arg((self.call.args, dict(self.call.kwargs)), held)
        try:
            with torch.no_grad():
                target: Any = self.call.target
                out = target(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()})
        except Exception as error:  # noqa: BLE001 - ops raise many kinds
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise _CannotRun(first) from error
        return out if isinstance(out, (tuple, list)) else (out,)  # type: ignore[return-value]

    def _draw(self, binding: Binding, turn: int) -> dict[fx.Node, Any]:
        positions = binding.shape(self.spelled.score)[-1]
        draw = Draw(self.generator, positions)
        size = _SIZES[turn % len(_SIZES)]
        env: dict[fx.Node, Any] = {}
        for role, node in self.roles.items():
            shape, dtype = binding.shape(node), dtype_of(node)
            if node in env:
                continue
            if role == "cache":
                env[node] = self._cache(draw, shape)
            elif role == "block_table":
                pages = binding.shape(self.roles["cache"])[0]
                env[node] = draw.integer(shape, dtype, max(0, pages - 1))
            elif role == "block_ids":
                block = self.given.number(self.adapter.block_size, "block_size")
                kind = _BLOCKS[turn % len(_BLOCKS)]
                env[node] = draw.ids(shape, dtype, -(-positions // block), kind)
            elif role in ("row_start", "row_end", "context_lens"):
                high = positions // 2 if role == "row_start" else positions
                env[node] = draw.integer(shape, dtype, high)
            elif role == "logits":
                # No two scores of a row are equal, so that the picks are determined.
                order = torch.rand(shape, generator=self.generator).argsort(-1)
                hidden = torch.rand(shape, generator=self.generator) < 0.2
                scores = (order.float() - shape[-1] / 2) * (size / 8)
                env[node] = scores.masked_fill(hidden, -torch.inf).to(dtype)
            elif is_float(node):
                drawn = draw.normal(shape, torch.float32)
                if role == "key_scale":
                    drawn = drawn.abs() + 0.1
                elif role == "query":
                    drawn *= size
                env[node] = drawn.to(dtype)
            else:
                raise Refusal(f"{role} of {self.adapter.op} has dtype {dtype}", 5)
        return env

    @staticmethod
    def _cache(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
        pages, page, width = shape[0], shape[1], shape[-1]
        cache = torch.zeros((pages, page, width), dtype=torch.uint8)
        keys = draw.normal((pages * page, width - 4), torch.float32)
        values, scales = quantise(keys, "fp8", power_of_two=False, floor=1e-4)
        assert scales is not None
        write_slots(cache, values, scales, torch.arange(pages * page), "fp8")
        return cache.reshape(shape)
