"""`holdfast inspect` of a compressed checkpoint: codec and ratio of each tensor, and why the save decided so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast as package
from tests.unit.cli.running import holdfast


def state() -> dict[str, dict[str, torch.Tensor]]:
    masters = {"w": torch.randn(300, 300, generator=torch.Generator().manual_seed(5)) / 50}
    noise = torch.randint(0, 256, (1 << 17,), generator=torch.Generator().manual_seed(6), dtype=torch.uint8)
    weights = {name: each.bfloat16() for name, each in masters.items()}
    return {"model": weights, "master": masters, "other": {"noise": noise, "small": torch.ones(3)}}


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coded") / "c"
    # Of a job of its own: one that has saved noise before does not code it again.
    settings = package.Settings(compression="on", lease_seconds=8.5)
    package.save(path, state(), process_group=False, settings=settings)
    return path


def test_tensors_show_codec_and_ratio(coded: Path) -> None:
    words = [line.split() for line in holdfast("inspect", coded).out.splitlines()]
    header = next(line for line in words if line[:1] == ["TENSOR"])
    assert header[-2:] == ["RATIO", "CODEC"]
    by_name = {line[0]: line for line in words if line and line[0].startswith(("model.", "master.", "other."))}
    assert by_name["master.w"][-2:] == ["2.00", "residual"]
    assert by_name["model.w"][-1] == "planes" and 1.4 < float(by_name["model.w"][-2]) < 1.6
    assert by_name["other.noise"][-2:] == ["1.00", "raw"]
    assert by_name["other.small"][-2:] == ["1.00", "raw"]


def test_totals_show_stored_bytes_and_decisions_their_reasons(coded: Path) -> None:
    out = holdfast("inspect", coded).out
    words = [line.split() for line in out.splitlines()]
    totals = words.index(["KEY", "TENSORS", "BYTES", "STORED", "RATIO"])
    master = next(line for line in words[totals:] if line[:1] == ["master"])
    assert master == ["master", "1", "351.6", "KiB", "175.8", "KiB", "2.00"]
    decisions = out[out.index("decisions of the save") :]
    rows = {
        tuple(line.split()[:2]): line for line in decisions.splitlines() if line.startswith(("float32", "uint8", "b"))
    }
    assert "residual" in rows["float32", "master"] and rows["float32", "master"].endswith('compression="on"')
    assert "raw" in rows["uint8", "buffer"].split()


def test_json_has_sizes_codecs_and_decisions(coded: Path) -> None:
    document = holdfast("inspect", coded, "--json").json()
    master, small = document["tensors"]["master.w"], document["tensors"]["other.small"]
    assert master["codecs"] == {"residual": 1} and master["bytes"] == 360_000
    (piece,) = master["pieces"]
    assert piece["stored_bytes"] == master["stored_bytes"] < 181_000 and "/coded/" in f"/{piece['pack']}"
    assert (small["codecs"], small["stored_bytes"], small["bytes"]) == ({"raw": 1}, 12, 12)
    assert document["totals"]["master"] == {"tensors": 1, "bytes": 360_000, "stored_bytes": master["stored_bytes"]}
    decisions = {each["kind"]: each for each in document["codings"]}
    assert decisions["float32 master"]["codec"] == "residual" and decisions["float32 master"]["rank"] == 0
    assert decisions["float32 master"]["stored_bytes"] == master["stored_bytes"]
    assert decisions["uint8 buffer"]["codec"] == ""


def test_reports_that_are_gone_or_damaged_take_nothing_but_the_reasons(coded: Path) -> None:
    (report,) = (coded / "reports").glob("save-*.json")
    whole = report.read_bytes()
    try:
        for content in (b"", whole.replace(b"residual", b"reverted"), None):
            report.unlink(missing_ok=True)
            if content is not None:
                report.write_bytes(content)
            document = holdfast("inspect", coded, "--json").json()
            assert document["codings"] == [] and document["tensors"]["master.w"]["codecs"] == {"residual": 1}
            assert "decisions of the save" not in holdfast("inspect", coded).out
    finally:
        report.write_bytes(whole)


def test_a_plain_checkpoint_is_shown_as_before(tmp_path: Path) -> None:
    package.save(tmp_path / "c", state(), process_group=False)
    out = holdfast("inspect", tmp_path / "c").out
    assert "RATIO" not in out and "CODEC" not in out and "decisions" not in out
    document = holdfast("inspect", tmp_path / "c", "--json").json()
    assert document["codings"] == [] and document["tensors"]["master.w"]["codecs"] == {"raw": 1}
