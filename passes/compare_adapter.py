"""Whether an opaque op gives what its plain form gives, up to the rounding of its operands."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.adapter import UNWRITTEN, Adapter
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.graph_tools import dtype_of, is_float
from dsa_compile.passes.run_probe import evaluate, needed
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.spell_adapters import Spelled


class AdapterComparison:
    """Compares the results of a call with those of its plain form.

    Args:
        adapter: what is declared about the op.
        spelled: its plain form.
        roles: the tensors that play the roles of the adapter.
    """

    def __init__(self, adapter: Adapter, spelled: Spelled, roles: dict[str, fx.Node]) -> None:
        self.adapter, self.spelled, self.roles = adapter, spelled, roles
        self.outs = list(spelled.outs.values())

    def shows(
        self,
        env: dict[fx.Node, Any],
        new: dict[fx.Node, Any],
        old: tuple[torch.Tensor, ...],
        binding: Binding,
    ) -> bool:
        """Whether a probe shows a value that both agree on.

        Args:
            env: the drawn arguments.
            new: what the plain form makes of them.
            old: what the op makes of them.
            binding: sizes of the probe.

        Raises:
            Refusal: they differ; the text names the first place.
        """
        if self.adapter.kind == "topk":
            return self._picks(env, new, old)
        if self.outs[0].meta["val"].dtype == torch.bool:
            return self._masks(new, old[0])
        return self._scores(env, new, old[0], binding)

    def _scores(
        self, env: dict[fx.Node, Any], new: dict[fx.Node, Any], old: torch.Tensor, binding: Binding
    ) -> bool:
        (out,) = self.outs
        mine = new[out].double()
        theirs = self._shaped(old, mine.shape).double()
        seen = torch.ones_like(mine, dtype=torch.bool)
        if self.spelled.visible is not None:
            seen = (
                new[self.spelled.visible]
                .broadcast_to(
                    new[
                        self.spelled.core
                        if self.adapter.kind == "candidate_mask"
                        else self.spelled.score
                    ].shape
                )
                .reshape(mine.shape)
            )
        if self.adapter.masked != UNWRITTEN:
            wrong = ~seen & (theirs != mine)
            if wrong.any():
                raise self._differs(
                    "what its hidden columns hold is not what its adapter declares",
                    wrong,
                    theirs,
                    mine,
                )
        # A hidden logit stays one, whatever the op does to it.
        seen = seen & mine.isfinite()
        size = mine.abs()
        weights = self.roles.get("weights")
        if weights is not None:
            wide = {**env, weights: env[weights].abs()}
            size = evaluate(needed([out], wide), wide, binding)[out].double().abs()
        kinds = [dtype_of(out), *(dtype_of(n) for n in self.roles.values() if is_float(n))]
        epsilon = max(torch.finfo(k).eps for k in kinds if k.itemsize > 1)
        size = size.masked_fill(~seen, 0)
        limit = 8 * epsilon * size + 1e-5 * float(size.max()) if size.numel() else size
        wrong = seen & ~((mine - theirs).abs() <= limit)
        if wrong.any():
            raise self._differs("its scores are not what its adapter declares", wrong, theirs, mine)
        return bool(seen.any())

    def _masks(self, new: dict[fx.Node, Any], old: torch.Tensor) -> bool:
        (out,) = self.outs
        mine = new[out]
        theirs = self._shaped(old, mine.shape)
        wrong = theirs != mine
        if wrong.any():
            raise self._differs("its mask is not what its adapter declares", wrong, theirs, mine)
        return bool(mine.any()) and not bool(mine.all())

    def _picks(
        self, env: dict[fx.Node, Any], new: dict[fx.Node, Any], old: tuple[torch.Tensor, ...]
    ) -> bool:
        names = self.adapter.outputs
        if len(old) != len(names):
            raise Refusal(f"{self.adapter.op} gives {len(old)} outputs, {len(names)} declared", 8)
        mine = {n: new[o] for n, o in zip(names, self.outs, strict=True)}
        theirs = {n: self._shaped(o, mine[n].shape) for n, o in zip(names, old, strict=True)}
        if "values" in mine:
            a, b = (x["values"].double().sort(-1).values for x in (mine, theirs))
            if not torch.equal(a, b):
                raise self._differs("its values are not the best ones", a != b, b, a)
        found = True
        if "indices" in mine:
            a, b = mine["indices"].long(), theirs["indices"].long()
            if self.adapter.empty is None:
                scores = env[self.roles["logits"]].reshape(*a.shape[:-1], -1)
                if not bool(((b >= 0) & (b < scores.shape[-1])).all()):
                    raise Refusal(f"{self.adapter.op} gives positions out of range", 8)
                ranked = self.spelled.ranked
                bounded = scores
                if ranked is not None and ranked in new:
                    bounded = new[ranked].reshape(scores.shape)
                a, b = (torch.where(bounded.gather(-1, x) == -torch.inf, -1, x) for x in (a, b))
            a, b = a.sort(-1).values, b.sort(-1).values
            if not torch.equal(a, b):
                raise self._differs("its positions are not those of the best scores", a != b, b, a)
            found = bool((a >= 0).any())
        return found

    def _shaped(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if tensor.shape != shape:
            raise Refusal(
                f"{self.adapter.op} gives {tuple(tensor.shape)}, its adapter says {tuple(shape)}", 8
            )
        return tensor

    def _differs(
        self, what: str, wrong: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> Refusal:
        at = tuple(int(i) for i in wrong.nonzero()[0])
        place = ", ".join(map(str, at))
        return Refusal(
            f"{self.adapter.op}: {what}",
            8,
            f"at [{place}]: the op gives {float(old[at]):.6g}, its plain form {float(new[at]):.6g}",
        )
