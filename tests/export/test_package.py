"""Packages: compiled once, then loaded here, by PyTorch alone, and where they do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import dsa_compile
from dsa_compile.package_metadata import FILE, PackageMetadata
from dsa_compile.portable import conditions_of
from dsa_compile.program_files import read_metadata

from .conftest import EXAMPLES, OTHERS, needs_compiler
from .models import TwoLevel, assert_same, inputs

pytestmark = needs_compiler


def rewrite_metadata(file: Path, to: Path, **changes: Any) -> Path:
    """A copy of a package whose metadata says something else."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(FILE):
                data = json.dumps({**json.loads(data), **changes}).encode()
            new.writestr(name, data)
    return to


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300
    )


def test_a_package_gives_what_the_model_gives_at_all_sizes(model: TwoLevel, made: Path) -> None:
    run = dsa_compile.load(made)
    for args in (EXAMPLES, OTHERS, inputs(rows=40, positions=43, seed=5)):
        assert_same(run(*args), model(*args))


def test_inputs_laid_out_otherwise_are_refused(model: TwoLevel, made: Path) -> None:
    """The compiled code reads memory as the example was laid out."""
    run = dsa_compile.load(made)
    x, keys = OTHERS
    for other in (x.mT.contiguous().mT, torch.cat((x, x), -1)[..., : x.shape[-1]]):
        with pytest.raises(dsa_compile.InputError, match=r"argument x: packaged with strides .*"):
            run(other, keys)
    one = inputs(rows=1, positions=43, seed=6)
    # Strides of a dimension of one mean nothing.
    assert_same(run(one[0].mT.contiguous().mT, one[1]), model(*one))


def test_plain_values_of_a_call_are_conditions() -> None:
    """They are compiled in."""

    class Scaled(torch.nn.Module):
        def forward(self, x: Any, how: dict[str, Any], flag: bool = True) -> Any:
            return x * how["gain"] if flag else x

    program = torch.export.export(Scaled(), (torch.ones(3), {"gain": 0.5}), {"flag": True})
    assert conditions_of(program) == ("L['how']['gain'] == 0.5", "L['flag'] == True")


def test_metadata_says_where_it_comes_from_and_what_it_needs(made: Path) -> None:
    metadata = read_metadata(made)
    assert metadata == dsa_compile.load(made).metadata
    assert metadata.torch == torch.__version__.partition("+")[0]
    assert metadata.target == "cpu" and all("L['" in c for c in metadata.conditions)
    assert metadata.ops == () and metadata.libraries == () and metadata.triton is None
    assert metadata.provenance is not None
    assert metadata.provenance.config["require_match"] == 2
    assert [site.status for site in metadata.provenance.report.sites] == ["fused", "rewritten"]
    assert [given["name"] for given in metadata.inputs] == ["x", "keys"]
    assert metadata.inputs[0]["shape"][0] == 1 and isinstance(metadata.inputs[0]["shape"][1], str)
    assert PackageMetadata.from_json(metadata.to_json()) == metadata


PLAIN = """
import sys
sys.modules["dsa_compile"] = None
import torch
run = torch._inductor.aoti_load_package(sys.argv[1])
for args, expected in torch.load(sys.argv[2]):
    for mine, theirs in zip(run(*args), expected, strict=True):
        assert torch.equal(mine.sort(-1).values, theirs.sort(-1).values)
print(sorted(n for n in sys.modules if n.startswith("dsa_compile.")))
"""


def test_pytorch_alone_runs_it(model: TwoLevel, made: Path, tmp_path: Path) -> None:
    cases = [(args, model(*args)) for args in (EXAMPLES, OTHERS)]
    torch.save(cases, tmp_path / "cases.pt")
    done = python(PLAIN, str(made), str(tmp_path / "cases.pt"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_ops_that_stay_outside_are_named_and_loaded(
    model: TwoLevel, kept: Path, tmp_path: Path
) -> None:
    metadata = read_metadata(kept)
    assert "dsa_cpu::sparse_mqa_logits" in metadata.ops
    assert metadata.libraries == ("dsa_compile.kernels",)
    torch.save([(EXAMPLES, model(*EXAMPLES))], tmp_path / "cases.pt")
    plain = python(PLAIN, str(kept), str(tmp_path / "cases.pt"))
    assert plain.returncode != 0 and "schema" in plain.stderr
    ours = PLAIN.replace('sys.modules["dsa_compile"] = None', "import dsa_compile")
    ours = ours.replace("torch._inductor.aoti_load_package", "dsa_compile.load")
    done = python(ours, str(kept), str(tmp_path / "cases.pt"))
    assert done.returncode == 0, done.stderr


def test_calls_that_it_does_not_serve(made: Path) -> None:
    run, (x, keys) = dsa_compile.load(made), EXAMPLES
    with pytest.raises(dsa_compile.InputError, match="x: packaged with dtype float32, got float64"):
        run(x.double(), keys)
    with pytest.raises(dsa_compile.InputError, match=r"keys: packaged with shape \[1, "):
        run(x, keys[..., :-1])
    with pytest.raises(dsa_compile.InputError, match="2 tensors in the arguments x, keys, got 1"):
        run(x)


def test_sizes_outside_its_conditions_are_an_error(made: Path, tmp_path: Path) -> None:
    text = "L['x'].size()[1] < 12"
    file = rewrite_metadata(made, tmp_path / "changed.pt2", conditions=[text])
    run = dsa_compile.load(file)
    run(*EXAMPLES)
    with pytest.raises(dsa_compile.InputError, match=r"only sizes where x.shape\[1\] < 12"):
        run(*OTHERS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"torch": "2.9.1"}, r"made with torch 2\.9\.1, and this is .*; package the program with"),
        ({"target": "sm90"}, "made for target sm90, and "),
        ({"machine": "s390x"}, "made for s390x, and this is"),
        ({"features": ["avx1024"]}, "a processor with avx1024, which this one lacks"),
        ({"libraries": ["dsa_compile.kernels.gone"]}, "library dsa_compile.kernels.gone cannot be"),
        ({"ops": ["other::op"]}, "the op other::op is not registered here; import the library"),
    ],
)
def test_what_a_package_needs_and_is_not_here(
    made: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    if changes.get("target") and torch.cuda.is_available():
        changes = {"target": "sm70"}
        told = "made for target sm70, and "
    file = rewrite_metadata(made, tmp_path / "changed.pt2", **changes)
    with pytest.raises(dsa_compile.ProviderError, match=told):
        dsa_compile.load(file)


def test_all_needs_are_told_at_once(made: Path, tmp_path: Path) -> None:
    file = rewrite_metadata(made, tmp_path / "x.pt2", torch="1.0.0", ops=["a::b", "c::d.e"])
    with pytest.raises(dsa_compile.ProviderError) as fault:
        dsa_compile.load(file)
    assert len(fault.value.needs) == 3


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.98, 0.9999])
def test_a_truncated_file(made: Path, tmp_path: Path, keep: float) -> None:
    file = tmp_path / "short.pt2"
    data = made.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(dsa_compile.PackageError, match="damaged or cut off"):
        dsa_compile.load(file)


@pytest.mark.parametrize("where", [0.1, 0.3, 0.6, 0.9])
def test_a_file_with_a_changed_byte(made: Path, tmp_path: Path, where: float) -> None:
    data = bytearray(made.read_bytes())
    with zipfile.ZipFile(made) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    start = largest.header_offset + 30 + len(largest.filename) + 200
    data[start + int(largest.file_size * where * 0.9)] ^= 0xFF
    file = tmp_path / "changed.pt2"
    file.write_bytes(data)
    with pytest.raises(dsa_compile.PackageError, match="damaged or cut off"):
        dsa_compile.load(file)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no .pt2 file"),
        (b"hello" * 99, "no .pt2 file"),
        (b"PK\x03\x04 and no more", "damaged"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "foreign.pt2"
    file.write_bytes(content)
    for read in (dsa_compile.load, dsa_compile.export):
        with pytest.raises(dsa_compile.PackageError, match=told):
            read(file)


def test_files_of_another_kind(program: Any, made: Path, tmp_path: Path) -> None:
    saved, zipped, other = (tmp_path / n for n in ("saved.pt2", "zipped.pt2", "other.pt2"))
    torch.export.save(program, saved)
    with pytest.raises(dsa_compile.PackageError, match="holds an exported program"):
        dsa_compile.load(saved)
    with pytest.raises(dsa_compile.PackageError, match="dsa_compile.load runs it"):
        dsa_compile.export(made)
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(dsa_compile.PackageError, match="archive without an exported program"):
        dsa_compile.load(zipped)
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            if not name.endswith(FILE):
                new.writestr(name, old.read(name))
    with pytest.raises(dsa_compile.PackageError, match="dsa_compile did not make this package"):
        dsa_compile.load(other)
    with pytest.raises(dsa_compile.PackageError, match="there is no such file"):
        dsa_compile.load(tmp_path / "missing.pt2")
    with pytest.raises(dsa_compile.PackageError, match="has format 99 and this version reads"):
        dsa_compile.load(rewrite_metadata(made, tmp_path / "later.pt2", format=99))


def test_what_cannot_be_packaged(program: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    with pytest.raises(TypeError, match="program must be a torch.export.ExportedProgram"):
        dsa_compile.package(TwoLevel(), file)
    with pytest.raises(dsa_compile.PackageError, match="path must end in .pt2"):
        dsa_compile.package(program, tmp_path / "model.so")
    with pytest.raises(dsa_compile.PackageError, match="no such folder"):
        dsa_compile.package(program, tmp_path / "nowhere" / "model.pt2")
    with pytest.raises(dsa_compile.ConfigError, match="did you mean 'sm90'"):
        dsa_compile.package(program, file, target="sm9")
    with pytest.raises(dsa_compile.ProviderError, match="tensors are on cpu, which is cpu here"):
        dsa_compile.package(program, file, target="sm90")
    assert not file.exists()


def test_a_missing_compiler_is_told(program: Any, tmp_path: Path) -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(dsa_compile.ProviderError, match=r"no C\+\+ compiler.*variable CXX"),
    ):
        dsa_compile.package(program, tmp_path / "model.pt2")


def test_an_old_package_stays_where_a_new_one_fails(program: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    file.write_bytes(b"as it was")
    with pytest.raises(dsa_compile.PackageError, match="no_such_option"):
        dsa_compile.package(program, file, inductor_configs={"no_such_option": 1})
    assert file.read_bytes() == b"as it was"
