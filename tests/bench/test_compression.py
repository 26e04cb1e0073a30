"""The bench of compression: what its rounds say, its stores, the names and numbers of its states."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from bench import compression, compression_reads, compression_table, report
from bench.compression_auto import UNCAPPED, continued, decisions, managers
from bench.compression_codecs import Ours
from bench.compression_on_paper import PaperCoding
from bench.compression_parts import COMPRESSION_PARTS
from bench.compression_state import (
    FULL,
    KINDS,
    PEAK,
    VARIABLE,
    Gpt,
    MixedTraining,
    Schedule,
    State,
    bytes_of,
    initial_masters,
    of_kinds,
    path_of,
    rate_of,
    repeated,
    snapshots,
    split,
)
from bench.compression_store import CappedStore, CountingStore, Line, manager_over
from bench.goals import GOALS
from bench.part import Measured, Part
from holdfast.backends.stores.local import LocalStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import PackItem, PackPlan
from holdfast.core.plan.pairs import pairs_of
from holdfast.settings import Settings

ROUNDS: dict[str, dict[str, float]] = {
    "ratios": {"ours": 1.4, "plain_weights": 1.3, "zipnn": 1.25, "dcp_zstd": 1.12},
    "ddp2": {"ddp2": 1.4},
    "hsdp": {"hsdp": 1.4},
    "fp32_fsdp2": {"fsdp": 1.2},
    "codecs": {
        "encode": 1.0,
        "zipnn_encode": 2.0,
        "zstd3_encode": 3.0,
        "decode": 2.0,
        "zipnn_decode": 1.0,
        "wall_1": 2.0,
        "wall_2": 1.0,
    },
    "speed": {"save": 1.0, "save_dcp_1": 4.0, "save_dcp_2": 3.0, "load": 1.0, "load_dcp_1": 2.0, "load_dcp_2": 4.0},
    "auto": {
        f"{mode}_{cap}": seconds for cap in (100, 250, 500, 1000, 0) for mode, seconds in (("off", 3), ("auto", 2))
    },
    "slowdown": {"auto": 1.1, "off": 1.0},
    "reads": {"weights": 1.0, "masters": 1.01},
    "reshard": {"2_to_3": 1.0, "4_to_2": 1.02, "fsdp_to_tp": 1.01},
    "peak": {"blocking": 20.0, "copy": 30.0, "lazy": 40.0},
    "paper": {"index_bytes": 330.0, "chunks": 10.0},
}
"""What one round of each part may have measured."""


# ------------------------------------------------------------------------------- keys and results


def test_every_part_measures_the_keys_that_are_listed_for_it() -> None:
    known = {goal.key for goal in GOALS}
    assert set(compression.KEYS) == set(COMPRESSION_PARTS) == set(ROUNDS)
    for name, part in COMPRESSION_PARTS.items():
        assert set(part.keys([ROUNDS[name]], {})) == set(compression.KEYS[name]) <= known
        if part.values is not None:
            assert set(part.values([ROUNDS[name]], {})) == set(compression.KEYS[name])


def test_rounds_become_ratios() -> None:
    found = {
        key: spread.median
        for name, part in COMPRESSION_PARTS.items()
        for key, spread in part.keys([ROUNDS[name], ROUNDS[name]], {}).items()
    }
    assert found["ratio_vs_dcp_zstd"] == 1.4 / 1.12
    assert (found["encode_vs_zipnn"], found["encode_vs_zstd3"], found["decode_vs_zipnn"]) == (2.0, 3.0, 0.5)
    assert (found["save_on_vs_dcp_zstd"], found["load_on_vs_dcp_zstd"]) == (3.0, 2.0)
    assert (found["auto_vs_raw_slow"], found["coding_slowdown"]) == (1.5, 1.1)
    assert (found["coded_read_amplification"], found["compression_peak_extra_mib"]) == (1.02, 40.0)
    assert found["index_bytes_per_chunk_coded"] == 33.0


def test_the_worst_store_is_the_one_with_the_lowest_median() -> None:
    part = COMPRESSION_PARTS["auto"]
    rounds = [{f"off_{cap}": 1.0, f"auto_{cap}": 0.5} for cap in (100, 250, 1000, 0) for _ in range(3)]
    rounds += [{"off_500": 1.0, "auto_500": seconds} for seconds in (0.4, 1.25, 2.0)]
    worst = part.keys(rounds, {})["auto_vs_raw_worst"]
    assert (worst.median, worst.low, worst.high) == (0.8, 0.5, 2.5)


def runs(ran: list[str]) -> Callable[..., Measured]:
    """Return a runner that measures what `ROUNDS` says."""

    def run(part: Part, params: dict[str, int], folder: Path, variables: dict[str, str]) -> Measured:
        assert params == part.quick and variables[VARIABLE] == "/trained"
        ran.append(part.name)
        return Measured([ROUNDS[part.name]] * 7, [f"{part.name} said"])

    return run


def trained_elsewhere(folder: Path, schedule: Schedule) -> Path:
    """Train nothing."""
    return Path("/trained")


def run_main(tmp_path: Path, ran: list[str], *arguments: str) -> int:
    return compression.main(
        ["--quick", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json"), *arguments],
        run=runs(ran),
        train=trained_elsewhere,
        lacks=list,
    )


def test_chosen_keys_are_measured_and_others_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    assert run_main(tmp_path, ran, "--only", "ratio_ddp2,reads,encode_vs_zipnn") == 0
    assert ran == ["ddp2", "codecs", "reads"]
    # 1.1 is above the floor of 1.05.
    assert run_main(tmp_path, ran, "--only", "coding_slowdown") == 1
    assert ran[3:] == ["slowdown"]
    assert "below the floor" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["ratio_ddp2"], written["encode_vs_zipnn_min"], written["coding_slowdown"]) == (1.4, 2.0, 1.1)
    assert written["parts"]["codecs"]["intervals"]["encode_vs_zipnn"] == [2.0, 2.0]
    assert written["parts"]["reads"]["notes"] == ["reads said"]
    assert "zipnn" in written["parts"]["reads"]["with"]


def test_everything_is_measured_without_only(tmp_path: Path) -> None:
    ran: list[str] = []
    run_main(tmp_path, ran)
    assert ran == list(COMPRESSION_PARTS)
    written = json.loads((tmp_path / "out.json").read_text())
    assert {key for keys in compression.KEYS.values() for key in keys} <= set(written)


def test_an_interrupted_bench_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    measure = runs(ran)

    def run(part: Part, *arguments: object, **named: object) -> Measured:
        if part.name == "reads":
            raise KeyboardInterrupt
        return measure(part, *arguments, **named)

    command = ["--quick", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json"), "--only", "ddp2,reads,peak"]
    assert compression.main(command, run=run, train=trained_elsewhere, lacks=list) == 130
    assert "--only reads,peak measures the rest" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["ratio_ddp2"] == 1.4
    assert run_main(tmp_path, ran, "--only", "reads,peak") == 0
    assert ran == ["ddp2", "reads", "peak"]


def test_a_wrong_call_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run_main(tmp_path, [], "--only", "ratio_none")
    assert refused.value.code == 2
    assert "ratio_none: unknown" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compression.main(["--quick"], lacks=lambda: ["zipnn"])
    assert "zipnn: not installed; make bench-compression" in capsys.readouterr().err


# ------------------------------------------------------------------------------- the trained state


@pytest.fixture(scope="module")
def trained() -> State:
    """Return the state after two steps on random bytes."""
    training = MixedTraining(initial_masters())
    generator = torch.Generator().manual_seed(3)
    for step in range(2):
        loss = training.step(torch.randint(256, (1, 17), generator=generator), rate_of(step, 10))
        assert 4 < loss < 7, "about the entropy of a byte"
    return {name: tensor.clone() for name, tensor in training.state().items()}


def test_a_state_has_fourteen_bytes_a_parameter(trained: State) -> None:
    count = sum(parameter.numel() for parameter in Gpt().parameters())
    assert count >= 3_000_000
    assert bytes_of(trained) == 14 * count
    for name, weight in of_kinds(trained, "weight").items():
        master = trained[KINDS["master"].format(split(name)[1])]
        assert torch.equal(weight, master.to(torch.bfloat16)), name
        assert trained[KINDS["exp_avg"].format(split(name)[1])].abs().max() > 0


def test_a_training_is_the_same_again(trained: State) -> None:
    first, second = (continued(trained) for _ in range(2))
    batch = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(5))
    assert first.step(batch, 1e-4) == second.step(batch, 1e-4)
    for (name, one), other in zip(first.state().items(), second.state().values(), strict=True):
        assert torch.equal(one, other), name
        assert name == KINDS[split(name)[0]].format(split(name)[1])


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [rate_of(step, FULL.steps) for step in range(FULL.steps + 1)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert (max(rates), rates[-1]) == (PEAK, pytest.approx(PEAK / 10))
    assert set(FULL.kept) == {100, 120, 300}


def test_every_master_of_a_repeated_state_has_its_weight(trained: State) -> None:
    state = repeated(trained, 3 * bytes_of(trained))
    assert bytes_of(state) == 3 * bytes_of(trained)
    specs = [
        TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in state.items()
    ]
    pairs = pairs_of((spec, Box.whole(spec.global_shape)) for spec in specs)
    found = {master: weight for (master, _), weight in pairs.items()}
    assert found == {name: KINDS["weight"].format(split(name)[1]) for name in state if split(name)[0] == "master"}


def test_snapshots_are_read_in_the_order_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    for step in (120, 20, 100):
        save_file({"model.x": torch.full((2,), float(step))}, path_of(tmp_path, step))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert [float(state["model.x"][0]) for state in snapshots()] == [20, 100, 120]


# ------------------------------------------------------------------------------- stores


def test_all_users_of_a_line_share_its_speed(tmp_path: Path) -> None:
    lines = [Line(tmp_path / "line", 1_000_000) for _ in range(2)]
    start = time.monotonic()
    threads = [threading.Thread(target=lines[number % 2].send, args=(50_000,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start >= 0.2
    for line in lines:
        line.close()


def test_packs_go_over_the_line_and_come_back(tmp_path: Path) -> None:
    chosen, line = Settings(), Line(tmp_path / "line", 4_000_000)
    state, target = {"x": torch.rand(1 << 18)}, {"x": torch.zeros(1 << 18)}
    start = time.monotonic()
    with manager_over(CappedStore(tmp_path / "run", chosen, line), chosen, False) as run:
        run.save(0, state).wait()
    assert time.monotonic() - start >= (1 << 20) / 4_000_000
    line.close()
    store = CountingStore(tmp_path / "run", chosen)
    with manager_over(store, chosen, False) as run:
        run.load(target)
    assert torch.equal(state["x"], target["x"])
    of_packs = sum(count for key, count in store.read_bytes.items() if key.endswith(".safetensors"))
    assert of_packs == 1 << 20
    assert sum(store.read_bytes.values()) > of_packs, "the index was read too"


def test_a_run_without_a_cap_goes_to_the_folder_itself(tmp_path: Path) -> None:
    with managers(tmp_path, UNCAPPED) as runs:
        assert set(runs) == {"off", "auto"}
        report = runs["auto"].save(0, {"x": torch.rand(1 << 16)}).wait()
    assert report is not None and Path(report.url).is_relative_to(tmp_path / "auto")
    assert "float32" in decisions(report)


# ------------------------------------------------------------------------------- what is counted


def test_headers_state_the_bytes_that_tensors_are_stored_in(trained: State, tmp_path: Path) -> None:
    few = {name: trained[name] for name in trained if "layers.0.up" in name}
    chosen = holdfast.Settings(compression="on")
    with manager_over(LocalStore(tmp_path, settings=chosen), chosen, False) as run:
        run.save(0, few).wait()
    stored = compression_reads.stored_bytes(tmp_path)
    assert set(stored) == set(few)
    assert all(stored[name] < tensor.nbytes for name, tensor in few.items())
    assert sum(stored.values()) < bytes_of(few) / 1.3


def test_what_the_codecs_encode_they_decode(trained: State) -> None:
    few = {name: trained[name].clone() for name in trained if "layers.1.qkv" in name or "layers.1.norm" in name}
    ours = Ours(few)
    ours.encode()
    ours.decode()
    # One changed byte of what is stored is found.
    ours._windows[1000] ^= 1
    with pytest.raises((AssertionError, holdfast.CorruptError)):
        ours.decode()


def test_paper_codings_are_as_long_as_measured(trained: State) -> None:
    specs = {
        name: TensorSpec(name, str(each.dtype)[6:], (1024, 1024)) for name, each in trained.items() if "qkv" in name
    }
    coding = PaperCoding(Settings())
    for is_weight in (True, False):
        names = [name for name in specs if (split(name)[0] == "weight") == is_weight]
        items = tuple(PackItem(specs[name], Box.whole((1024, 1024)), 0, 0, "planes") for name in names)
        for item, each in zip(items, coding.codings_of(PackPlan("coded/r00000.safetensors", items)), strict=True):
            assert len(each.numbers) == item.bytes >> 20 == len(each.starts) - 1
            expected = 0.5 if split(item.tensor.fqn)[0] == "master" else 0.66 if is_weight else 0.81
            assert each.starts[-1] / item.bytes == pytest.approx(expected, abs=0.03)
            assert bool(each.pair_fqn) == (split(item.tensor.fqn)[0] == "master")


# ------------------------------------------------------------------------------- the table


def test_the_page_says_what_was_measured_last() -> None:
    rows = [compression_table.Row(*row) for row in report.read(compression.RESULTS)["table"]]  # type: ignore[attr-defined]
    said = compression_table.block(rows)
    assert said in compression_table.PAGE.read_text(), "`python -m bench.compression --table` fills it"


def test_a_table_goes_between_the_markers(tmp_path: Path) -> None:
    rows = [compression_table.Row("weights", "bfloat16", "planes", 1.504), compression_table.Row("all", "", "", 1.4)]
    page = tmp_path / "page.md"
    page.write_text("no place\n")
    with pytest.raises(ValueError, match="no <!-- ratios: begin"):
        compression_table.put_block(page, rows)
    page.write_text(f"before\n{compression_table.BEGIN}\nold\n{compression_table.END}\nafter\n")
    compression_table.put_block(page, rows)
    text = page.read_text()
    assert "| weights | bfloat16 | `planes` | 1.50 |\n| all |  |  | 1.40 |\n" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


@pytest.mark.parametrize("is_signed", [True, False])
def test_eight_bit_moments_are_near_the_numbers(is_signed: bool) -> None:
    codes = compression_table.dynamic_codes(is_signed)
    assert len(codes) == 256 == len(codes.unique())
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    numbers = numbers if is_signed else numbers.square()
    stored = compression_table.to_dynamic_8bit(numbers, is_signed)
    assert (stored.dtype, stored.shape) == (torch.uint8, numbers.shape)
    for start in range(0, 1000, 256):
        block = numbers[start : start + 256]
        back = codes[stored[start : start + 256].long()] * block.abs().max()
        nearest = (codes[None] * block.abs().max() - block[:, None]).abs().min(dim=1).values
        assert torch.allclose((back - block).abs(), nearest, atol=1e-6)


def test_quantised_weights_use_the_whole_range() -> None:
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    whole = compression_table.to_int8(weights)
    assert whole.dtype == torch.int8
    assert bool((whole.abs().amax(dim=1) == 127).all())
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        small = compression_table.to_float8(weights, dtype)
        assert small.dtype == dtype
        assert float(small.float().abs().max()) == torch.finfo(dtype).max
