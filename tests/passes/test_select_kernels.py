"""Which ops run is what the provider's name says."""

import pytest
from pass_models import TwoLevel, captured, hidden

from dsa_compile.passes.context import StageError
from dsa_compile.passes.pipeline import run_pipeline


@pytest.mark.parametrize(("provider", "namespace"), [("reference", "dsa"), ("cpu", "dsa_cpu")])
def test_every_call_is_the_providers(provider: str, namespace: str) -> None:
    result = run_pipeline(captured(TwoLevel(), hidden()), provider=provider)
    spaces = {n.split(".")[0] for n in result.op_counts_after if n.startswith("dsa")}
    assert spaces == {namespace}


def test_an_unknown_provider_is_named() -> None:
    with pytest.raises(StageError, match="provider 'tpu' is not known; known are cpu, deepgemm"):
        run_pipeline(captured(TwoLevel(), hidden()), provider="tpu")
