"""``bench`` and ``demo``: what the rewrite is worth on this machine."""

from __future__ import annotations

from typing import Any

from dsa_compile.commands.output import Output
from dsa_compile.config import near_miss
from dsa_compile.errors import ConfigError
from dsa_compile.measuring import FORMS, Case, Measured, measure

_MIB = 2**20
_DTYPES = ("float32", "bfloat16", "float16")


def cases_of(
    positions: list[int],
    rows: int,
    dtypes: list[str],
    device: str,
    forms: list[str],
    runs: int,
    threads: int | None,
) -> list[Case]:
    """What is to be measured.

    Raises:
        ConfigError: names the option whose value cannot be used.
    """
    for option, names, known in (("--dtype", dtypes, _DTYPES), ("--form", forms, FORMS)):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{option} must be one of {', '.join(known)}, got {name!r}"
                    + near_miss(name, known)
                )
    if rows > min(positions):
        raise ConfigError(
            f"--rows is {rows} and --positions {min(positions)}: rows are the last positions of "
            "the context, so there can be no more of them"
        )
    if device != "cpu":
        import torch

        if device.partition(":")[0] != "cuda":
            raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: there is no GPU here; dsa-compile doctor says more")
    return [Case(n, rows, name, device, runs, threads) for n in positions for name in dtypes]


def bench(out: Output, cases: list[Case], forms: list[str]) -> None:
    """Time and peak memory of a consumer layer: dense, dense compiled, and optimised."""
    results: list[tuple[Case, dict[str, Measured]]] = []
    with out.steps(len(cases) * len(forms)) as step:
        for case in cases:
            found = {}
            for form in forms:
                step(f"{case.positions:,} positions, {form}")
                found[form] = measure(case, form)
            results.append((case, found))
    rows = [_row(case, form, found) for case, found in results for form in found]
    out.show(_table(rows), bench=rows)


def _row(case: Case, form: str, found: dict[str, Measured]) -> dict[str, Any]:
    mine, compiled, dense = found[form], found.get("compiled"), found.get("dense")
    return {
        "positions": case.positions,
        "rows": case.rows,
        "dtype": case.dtype,
        "device": case.device,
        "form": form,
        "seconds": mine.seconds,
        "peak_bytes": mine.peak_bytes,
        "faster_than_compiled": compiled.seconds / mine.seconds if compiled else None,
        "picks_equal_dense": dense.picks == mine.picks if dense else None,
    }


def _table(rows: list[dict[str, Any]]) -> Any:
    from dsa_compile.report import plain_table

    numeric = ("positions", "rows", "time", "peak memory", "against compiled")
    columns = ("positions", "rows", "dtype", "form", *numeric[2:], "picks equal dense")
    table = plain_table(columns, (), numeric)
    for row in rows:
        peak, faster, equal = (
            row["peak_bytes"],
            row["faster_than_compiled"],
            row["picks_equal_dense"],
        )
        table.add_row(
            f"{row['positions']:,}",
            f"{row['rows']:,}",
            row["dtype"],
            row["form"],
            f"{1000 * row['seconds']:,.1f} ms",
            "unknown" if peak is None else f"{peak / _MIB:,.0f} MiB",
            "" if faster is None else f"{faster:.1f} x",
            "" if equal is None else ("yes" if equal else "no"),
        )
    return table


def demo(out: Output, case: Case) -> None:
    """Optimise and verify a small two-level model, then measure one of its consumer layers."""
    import torch

    from dsa_compile.demo_model import two_level
    from dsa_compile.optimizer import optimize
    from dsa_compile.verifier import verify

    with out.steps(4) as step:
        step("finding and rewriting the indexers")
        model, inputs = two_level(case.positions, case.rows)
        with torch.inference_mode():
            optimized = optimize(model, example_inputs=inputs)
            step("running both forms")
            found = verify(model, optimized, *inputs)
        costs = {}
        for form in ("dense", "optimized"):
            step(f"measuring a consumer layer, {form}")
            costs[form] = measure(case, form)
    out.show(f"{case.rows:,} query rows, {case.positions:,} positions, fp32 on the CPU")
    out.show(optimized.report, report=optimized.report.to_dict())
    out.show(found, verification=found.to_dict())
    lines = [_row(case, form, costs) for form in costs]
    out.show(_table(lines), bench=lines)
    if found.largest_score_difference > 1e-4:
        out.fail("the two forms select differently")
