"""What may be declared of an opaque op, and where declarations are kept."""

from __future__ import annotations

from typing import Any

import pytest

import dsa_compile
from dsa_compile.adapters import adapters_text

from .opaque_ops import DENSE, dense_adapter, empty_registry  # noqa: F401 - a fixture


def test_the_registry_is_explicit() -> None:
    assert adapters_text() == ""
    dense_adapter()
    assert list(dsa_compile.registered_adapters()) == ["dsa_test_engine::mqa_logits.default"]
    text = adapters_text()
    with pytest.raises(dsa_compile.ConfigError, match="dsa_test_engine::mqa_logits has an adapter"):
        dense_adapter()
    assert adapters_text() == text
    dsa_compile.remove_adapter("dsa_test_engine::mqa_logits")
    assert not dsa_compile.registered_adapters() and adapters_text() == ""
    with pytest.raises(dsa_compile.ConfigError, match="has no adapter"):
        dsa_compile.remove_adapter("dsa_test_engine::mqa_logits")
    dense_adapter(scale=2.0)
    assert adapters_text() != text
    with pytest.raises(TypeError):
        dsa_compile.registered_adapters()["x"] = None  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roles": {**DENSE, "wieghts": "weights"}}, "no role 'wieghts'; did you mean 'weights'"),
        ({"roles": {**DENSE, "query": "querry"}}, "no argument 'querry'"),
        ({"roles": {k: v for k, v in DENSE.items() if k != "key"}}, "needs 'key'"),
        ({"roles": {k: v for k, v in DENSE.items() if k != "row_end"}}, "'ke' has no role"),
        ({"kind": "dense_logit"}, "did you mean 'dense_logits'"),
        ({"op": "dsa_test_engine::nothing"}, "torch knows no"),
        ({"op": "aten::add_.Tensor"}, "writes to its arguments"),
        ({"masked": "dirty"}, "'unwritten'"),
        ({"ignored": ("claen",)}, "did you mean 'clean'"),
    ],
)
def test_a_bad_declaration_names_its_fault(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "op": "dsa_test_engine::mqa_logits",
        "kind": "dense_logits",
        "roles": DENSE,
        **change,
    }
    with pytest.raises(dsa_compile.ConfigError) as caught:
        dsa_compile.register_adapter(**given)
    assert message in str(caught.value)
    assert not dsa_compile.registered_adapters()
