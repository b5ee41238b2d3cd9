"""Packages with the Triton kernels inside, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dsa_compile
from dsa_compile.program_files import read_metadata
from dsa_compile.target import Target

from .conftest import QUICK, needs_compiler
from .models import TwoLevel, assert_same, inputs
from .test_package import PLAIN, python

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(tensors: Any) -> Any:
    return tuple(tensor.cuda() for tensor in tensors)


@pytest.fixture(scope="module")
def gpu_model() -> TwoLevel:
    return TwoLevel().eval().cuda()


def test_pytorch_alone_runs_a_package_of_its_own(tmp_path: Path) -> None:
    """Where this fails, so must what follows: no kernel of ours is in the package."""

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x + x,)

    args, file = (torch.randn(3, 16, device="cuda"),), tmp_path / "doubled.pt2"
    program = torch.export.export(Doubled(), args)
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(file), inductor_configs=QUICK
    )
    torch.save([(args, Doubled()(*args))], tmp_path / "cases.pt")
    done = python(PLAIN, str(file), str(tmp_path / "cases.pt"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dynamic", [False, True])
def test_pytorch_alone_runs_a_package_with_triton_kernels(
    gpu_model: TwoLevel, dynamic: bool, tmp_path: Path
) -> None:
    args, file = on_gpu(inputs(rows=33, positions=259)), tmp_path / "model.pt2"
    program = dsa_compile.export(
        gpu_model, args, config={"provider": "triton", "dynamic": dynamic, "require_match": 2}
    )
    target = Target.detect("cuda").name
    metadata = dsa_compile.package(program, file, target=target, inductor_configs=QUICK)
    assert metadata == read_metadata(file)
    assert metadata.target == target and metadata.triton is not None
    assert metadata.ops == () and metadata.libraries == ()
    torch.save([(args, gpu_model(*args))], tmp_path / "cases.pt")
    done = python(PLAIN, str(file), str(tmp_path / "cases.pt"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_other_sizes_are_served_or_refused_and_never_wrong(
    gpu_model: TwoLevel, tmp_path: Path
) -> None:
    """What the kernels' host code took for granted about sizes is a condition of the package."""
    args, file = on_gpu(inputs(rows=33, positions=259)), tmp_path / "model.pt2"
    program = dsa_compile.export(gpu_model, args, config={"provider": "triton", "require_match": 2})
    dsa_compile.package(program, file, inductor_configs=QUICK)
    run = dsa_compile.load(file)
    assert_same(run(*args), gpu_model(*args))
    served = 0
    for rows, positions in ((33, 263), (17, 259), (5, 67), (64, 1025), (200, 4099), (40, 20_003)):
        other = on_gpu(inputs(rows=rows, positions=positions, seed=rows))
        try:
            got = run(*other)
        except dsa_compile.InputError as fault:
            assert "serves only sizes where" in str(fault)
            continue
        served += 1
        assert_same(got, gpu_model(*other))
    assert served > 0


def test_a_package_for_another_gpu_is_refused(gpu_model: TwoLevel, tmp_path: Path) -> None:
    args = on_gpu(inputs(rows=33, positions=259))
    program = dsa_compile.export(gpu_model, args, config={"dynamic": False})
    other = "sm80" if Target.detect("cuda").name != "sm80" else "sm90"
    with pytest.raises(dsa_compile.ProviderError, match="package it on a machine with that GPU"):
        dsa_compile.package(program, tmp_path / "model.pt2", target=other)
    with pytest.raises(dsa_compile.ProviderError, match="export the model from that device"):
        dsa_compile.package(program, tmp_path / "model.pt2", target="cpu")


def test_the_cpu_form_of_a_reference_program_runs_on_a_gpu_too(
    gpu_model: TwoLevel, tmp_path: Path
) -> None:
    """The canonical ops become ATen on every device."""
    args, file = on_gpu(inputs(rows=33, positions=259)), tmp_path / "model.pt2"
    program = dsa_compile.export(
        gpu_model, args, config={"provider": "reference", "dynamic": False, "require_match": 2}
    )
    metadata = dsa_compile.package(program, file, inductor_configs=QUICK)
    assert metadata.ops == ()
    assert_same(dsa_compile.load(file)(*args), gpu_model(*args))
