"""What the commands show and how they end, run where there is no torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import holdfast as package
from tests.support.newer_format import write_newer
from tests.unit.cli.running import command, holdfast, on_terminal, separately

STEP = "step-000000000010"


def pack_of(checkpoint: Path) -> Path:
    (pack,) = checkpoint.glob("*/r00000.safetensors")
    return pack


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


# ------------------------------------------------------------------------------------------------------------ ls


def test_ls_lists_the_committed_steps_and_mentions_the_unfinished_one(pristine: Path) -> None:
    ended = separately("ls", pristine)
    assert (ended.status, ended.err) == (0, "")
    rows = rows_of(ended.out)
    manifest = package.open_checkpoint(pristine / STEP).manifest
    assert rows["10"][-2:] == [manifest.attempt, "yes"], "step 20 shares a pack of step 10, so ls says who stands alone"
    assert rows["20"][-1] == "yes"
    assert rows["10"][-3] == "1"
    assert rows["10"][4].isdigit() and rows["10"][5] in ("s", "min", "h"), "how long ago"
    assert rows["10"][6] == str(manifest.tensors)
    assert rows["20"][3] == "UTC"
    assert "step 30: unfinished" in ended.out


def test_ls_as_json_is_the_same_every_time(pristine: Path) -> None:
    ended = holdfast("ls", pristine, "--json")
    assert ended.out == holdfast("ls", pristine, "--json").out
    document = ended.json()
    assert set(document) == {"root", "run_id", "error", "steps", "logs", "agent"}
    assert [(each["step"], each["status"]) for each in document["steps"]] == [
        (10, "committed"),
        (20, "committed"),
        (30, "unfinished"),
    ]
    assert document["steps"][0]["bytes"] == package.open_checkpoint(pristine / STEP).manifest.tensor_bytes
    assert document["steps"][2]["leftovers"] == ["0123456789abcdef"]
    assert document["steps"][2]["tensors"] is None


def test_ls_shows_a_damaged_manifest_as_damaged_and_the_others_as_they_are(root: Path) -> None:
    flip(root / STEP / "manifest.json", 200)
    ended = holdfast("ls", root)
    assert ended.status == 0
    assert rows_of(ended.out)["10"][1] == "damaged"
    assert "expected" in next(line for line in ended.out.splitlines() if line.startswith("step 10:"))
    assert rows_of(ended.out)["20"][1] != "damaged"
    assert [each["status"] for each in holdfast("ls", root, "--json").json()["steps"]][:2] == ["damaged", "committed"]


@pytest.mark.parametrize("content", [b"", b"{", b"\x00" * 100, b"{}\n"])
def test_ls_shows_a_manifest_that_is_none_as_damaged(root: Path, content: bytes) -> None:
    (root / STEP / "manifest.json").write_bytes(content)
    assert rows_of(holdfast("ls", root).out)["10"][1] == "damaged"


def test_ls_takes_a_step_of_a_newer_format_for_no_damaged_one(root: Path) -> None:
    write_newer(root / STEP / "manifest.json")
    ended = holdfast("ls", root)
    assert ended.status == 0
    assert rows_of(ended.out)["10"][1] == "unreadable"
    assert "Read it with a newer Holdfast" in next(
        line for line in ended.out.splitlines() if line.startswith("step 10:")
    )
    statuses = [each["status"] for each in holdfast("ls", root, "--json").json()["steps"]]
    assert statuses[:2] == ["unreadable", "committed"]


def test_ls_takes_a_run_file_of_a_newer_format_for_no_damaged_one(root: Path) -> None:
    write_newer(root / "holdfast.json")
    ended = holdfast("ls", root)
    assert ended.status == 0
    assert "holdfast.json cannot be read: " in ended.out and "Read it with a newer Holdfast" in ended.out


def test_ls_tells_of_a_damaged_run_file_and_still_lists(root: Path) -> None:
    flip(root / "holdfast.json", 20)
    ended = holdfast("ls", root)
    assert ended.status == 0
    assert "holdfast.json is damaged" in ended.out
    assert "20" in rows_of(ended.out)


def test_ls_tells_of_leftovers_beside_a_committed_attempt(root: Path) -> None:
    (root / STEP / ("ab" * 8)).mkdir()
    ended = holdfast("ls", root)
    assert "step 10: holds 1 unfinished attempt beside the committed one" in ended.out


def test_ls_of_one_checkpoint_points_to_inspect(pristine: Path) -> None:
    ended = holdfast("ls", pristine / STEP)
    assert (ended.status, ended.out) == (2, "")
    assert "is one checkpoint" in ended.err
    assert "holdfast inspect" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_ls_of_a_run_without_a_step_yet(tmp_path: Path, pristine: Path) -> None:
    (tmp_path / "holdfast.json").write_bytes((pristine / "holdfast.json").read_bytes())
    ended = holdfast("ls", tmp_path)
    assert (ended.status, ended.out) == (0, "no committed step yet\n")


# ------------------------------------------------------------------------------------------------------- inspect


def test_inspect_shows_tensors_values_ties_and_provenance(pristine: Path) -> None:
    ended = separately("inspect", pristine / STEP)
    assert (ended.status, ended.err) == (0, "")
    manifest = package.open_checkpoint(pristine / STEP).manifest
    for fact in (str(pristine / STEP), manifest.run_id, manifest.attempt, manifest.digest, "torch 2."):
        assert fact in ended.out
    rows = rows_of(ended.out)
    assert rows["model.0.weight"] == ["model.0.weight", "float32", "[700,", "30]", "82.0", "KiB", "1", "rank", "0"]
    assert rows["half"][1] == "bfloat16"
    assert rows["optimizer.state.0.weight.step"][2] == "[]"
    assert "model.2.weight = model.0.tied" in ended.out
    assert "note: 'plain'" in ended.out
    assert "lr: 0.001" in ended.out
    assert ended.out.count("weight_decay: 0.01") == 1, "parameters with the same hyperparameters are told once"
    assert "0.weight, 0.bias, 0.tied, 2.weight, 2.bias:" in ended.out, "and every one of them is named"


def test_inspect_chooses_tensors_by_glob_and_by_the_name_they_are_tied_under(pristine: Path) -> None:
    ended = holdfast("inspect", pristine / STEP, "--tensors", "*.exp_avg")
    names = [name for name in rows_of(ended.out) if "." in name]
    assert names
    assert all(name.endswith(".exp_avg") for name in names)
    assert "values" not in ended.out
    assert "model.0.tied" in holdfast("inspect", pristine / STEP, "--tensors", "model.2.weight").out
    ended = holdfast("inspect", pristine / STEP, "--tensors", "nothing")
    assert (ended.status, "no tensor matches" in ended.out) == (0, True)


def test_inspect_as_json_says_what_open_checkpoint_says(pristine: Path) -> None:
    ended = holdfast("inspect", pristine / STEP, "--json")
    assert ended.out == holdfast("inspect", pristine / STEP, "--json").out
    document = ended.json()
    checkpoint = package.open_checkpoint(pristine / STEP)
    assert {fqn: tuple(each["shape"]) for fqn, each in document["tensors"].items()} == {
        fqn: info.shape for fqn, info in checkpoint.tensors.items()
    }
    tensor = document["tensors"]["model.0.weight"]
    assert tensor["pieces_by_rank"] == {"0": 1}
    assert tensor["pieces"][0]["start"] == [0, 0]
    assert tensor["pieces"][0]["stop"] == [700, 30]
    keys = ("exp_avg", "exp_avg_sq", "step")
    state = {f"optimizer.state.2.weight.{key}": f"optimizer.state.0.tied.{key}" for key in keys}
    assert document["aliases"] == {"model.2.weight": "model.0.tied", **state}
    assert document["values"]["note"] == "plain"
    assert document["values"]["optimizer"]["param_groups"]["0.bias"]["betas"] == {"$tuple": [0.9, 0.999]}
    assert document["world_size"] == 1


def test_what_a_checkpoint_holds_steers_no_terminal(hostile: Path) -> None:
    for arguments in (("inspect", hostile), ("inspect", hostile, "--json"), ("verify", hostile)):
        ended = holdfast(*arguments)
        assert ended.status == 0
        assert all(each.isprintable() or each == "\n" for each in ended.out + ended.err)
    shown = holdfast("inspect", hostile).out
    assert r"name\x1b]0;owned\x07\x1b[31m\u202e\x9b" in shown
    assert "[red]markup[/]: 1" in shown
    damaged = holdfast("inspect", hostile.parent / "no\x1b[31mwhere")
    assert damaged.status == 2
    assert "\x1b" not in damaged.err


def test_a_stream_that_takes_only_ascii_ends_no_command(hostile: Path) -> None:
    ended = separately("inspect", hostile, PYTHONIOENCODING="ascii")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.isascii()


def test_a_terminal_of_any_width_shows_every_name_whole(pristine: Path) -> None:
    fqn = "optimizer.state.0.weight.exp_avg_sq"
    for columns in (30, 60, 100, 200):
        ended = on_terminal("inspect", pristine / STEP, columns=columns)
        assert ended.status == 0
        assert fqn in ended.out
        assert "\x1b[" in ended.out, "colours are for terminals"
    assert "\x1b" not in holdfast("inspect", pristine / STEP).out


def test_a_long_list_is_cut_on_a_terminal_only_and_the_note_says_how_to_see_it(tmp_path: Path) -> None:
    import torch

    state = {f"t{number}": torch.zeros(1) for number in range(200)} | {"v": {f"k{n}": n for n in range(200)}}
    package.save(tmp_path / "many", state, process_group=False)
    shown = on_terminal("inspect", tmp_path / "many").out
    assert "and 150 more tensors: --all" in shown
    assert "more lines: --all" in shown
    assert "t150" not in shown
    for whole in (on_terminal("inspect", tmp_path / "many", "--all").out, holdfast("inspect", tmp_path / "many").out):
        assert all(f"t{number} " in whole for number in range(200))
        assert "k199: 199" in whole
        assert whole.index("t2 ") < whole.index("t10 "), "numbers in names sort as numbers"


# -------------------------------------------------------------------------------------------------------- verify


def test_verify_of_a_whole_checkpoint_ends_with_0(pristine: Path) -> None:
    ended = separately("verify", pristine / STEP)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("whole: ")
    assert separately("verify", pristine / STEP, "--json").json()["damages"] == []


def test_verify_names_tensor_pack_and_bytes_and_ends_with_1(root: Path) -> None:
    pack = pack_of(root / STEP)
    checkpoint = package.open_checkpoint(root / STEP)
    (piece,) = checkpoint.pieces("model.0.weight")
    flip(pack, piece.offset + 5)
    ended = separately("verify", root / STEP)
    assert ended.status == 1
    where = f"{checkpoint.manifest.attempt}/{pack.name} bytes {piece.offset}-{piece.offset + piece.bytes}"
    assert f"{where} (model.0.weight): " in ended.out
    assert "damaged: 1 place;" in ended.out
    document = separately("verify", root / STEP, "--json")
    assert document.status == 1
    (damage,) = document.json()["damages"]
    assert (damage["tensor"], damage["start"]) == ("model.0.weight", piece.offset)


@pytest.mark.parametrize("name", ["manifest.json", "*/index-00000.msgpack", "*/parts/r00000.msgpack"])
def test_verify_names_the_file_beside_the_packs_that_is_damaged(root: Path, name: str) -> None:
    (path,) = (root / STEP).glob(name)
    flip(path, 100)
    ended = holdfast("verify", root / STEP, "--json")
    assert ended.status == 1
    (damage,) = ended.json()["damages"]
    assert damage["file"] == path.relative_to(root / STEP).as_posix()


def test_verify_tells_a_missing_a_short_and_a_surplus_pack(root: Path) -> None:
    pack = pack_of(root / STEP)
    data = pack.read_bytes()
    pack.unlink()
    assert "missing" in holdfast("verify", root / STEP).out
    pack.write_bytes(data[:-1])
    assert f"{len(data) - 1} bytes; expected {len(data)}" in holdfast("verify", root / STEP).out
    pack.write_bytes(data)
    (pack.parent / "r00009.safetensors").write_bytes(data)
    ended = holdfast("verify", root / STEP)
    assert ended.status == 1
    assert "r00009.safetensors: a file that the manifest does not name" in ended.out


def test_verify_shows_a_bar_on_a_terminal_only(pristine: Path) -> None:
    shown = on_terminal("verify", pristine / STEP).out
    assert "verifying" in shown
    assert "/s" in shown
    assert "whole: " in shown


# ------------------------------------------------------------------------------------------------- how they end


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_nothing_there_is_one_line_and_2(tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "file", "", "s3://bucket/run", "memory://"):
        ended = holdfast(verb, path)
        assert (ended.status, ended.out) == (2, ""), path
        assert len(ended.err.splitlines()) == 1, ended.err
        assert ended.err.startswith("holdfast: ")


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_a_newer_format_is_refused_saying_what_reads_it(root: Path, verb: str) -> None:
    import xxhash

    path = root / STEP / "manifest.json"
    body = path.read_bytes().rpartition(b',\n "digest"')[0].replace(b"[\n   1,", b"[\n   9,", 1)
    path.write_bytes(body + b',\n "digest": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n')
    ended = holdfast(verb, root if verb == "ls" else root / STEP)
    assert ended.status == (0 if verb == "ls" else 2)
    assert "Read it with a Holdfast of major format 9" in ended.out + ended.err


def test_a_damaged_manifest_ends_inspect_with_1(root: Path) -> None:
    flip(root / STEP / "manifest.json", 200)
    ended = separately("inspect", root / STEP)
    assert (ended.status, ended.out) == (1, "")
    assert len(ended.err.splitlines()) == 1


def test_without_typer_and_rich_one_line_says_what_to_install() -> None:
    for absent in (("typer",), ("rich",)):
        ended = separately("ls", ".", absent=absent)
        assert (ended.status, ended.out) == (2, "")
        assert ended.err == f"holdfast: the command line needs {absent[0]}; pip install 'holdfast[cli]'\n"


def test_help_and_version() -> None:
    assert holdfast("--version").out == f"holdfast {package.__version__}\n"
    ended = holdfast("--help")
    assert ended.status == 0
    assert all(verb in ended.out for verb in ("ls", "inspect", "verify", "Exit status"))
    for verb in ("ls", "inspect", "verify"):
        assert "--json" in holdfast(verb, "-h").out
    assert holdfast("nonsense").status == 2


def test_a_reader_that_goes_away_is_no_complaint(pristine: Path) -> None:
    for arguments in (("inspect", pristine / STEP), ("inspect", pristine / STEP, "--json"), ("ls", pristine)):
        process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
        process.stderr.close()
        assert (process.wait(60), complaint) == (141, b"")


def test_an_interrupt_is_quiet_and_130(pristine: Path, tmp_path: Path) -> None:
    import numpy as np

    # Large enough that reading it takes longer than the interrupt, on however busy a machine.
    package.save(tmp_path / "large", {"x": np_tensor(np.zeros(3 << 27))}, process_group=False)
    ended = on_terminal("verify", tmp_path / "large", interrupt=True)
    assert ended.status == 130
    assert "Traceback" not in ended.out
    assert "Aborted" not in ended.out
    assert ended.out.rfind("\x1b[?25h") >= ended.out.rfind("\x1b[?25l"), "the cursor is shown again"


def np_tensor(array: object) -> object:
    import torch

    return torch.from_numpy(array)


# ------------------------------------------------------------------------------------------------- inspect --plan


def test_a_plan_shows_what_each_rank_would_read(pristine: Path) -> None:
    ended = separately("inspect", pristine / STEP, "--plan", "dp=2,fsdp=2")
    assert (ended.status, ended.err) == (0, "")
    rows = rows_of(ended.out)
    assert {"0", "1", "2", "3"} <= set(rows)
    assert rows["0"][1:] == rows["2"][1:]
    assert "dp=2 Replicate, fsdp=2 Shard(0)" in ended.out
    assert "plan for 4 ranks; nothing was read" in ended.out


def test_a_plan_as_json_counts_bytes(pristine: Path) -> None:
    manifest = package.open_checkpoint(pristine / STEP).manifest
    document = holdfast("inspect", pristine / STEP, "--plan", "dp=2", "--json").json()
    assert document["mesh"] == [{"name": "dp", "size": 2, "placement": "Replicate"}]
    assert document["tensor_bytes"] == manifest.tensor_bytes
    assert document["tensor_count"] == manifest.tensors
    assert document["imbalance"] == 1.0
    assert document["bytes"] == 2 * manifest.tensor_bytes
    assert [(each["rank"], each["held_bytes"], each["bytes"]) for each in document["ranks"]] == [
        (rank, manifest.tensor_bytes, manifest.tensor_bytes) for rank in (0, 1)
    ]
    half = holdfast("inspect", pristine / STEP, "--plan", "fsdp=2", "--tensors", "half", "--json").json()
    assert half["tensor_count"] == 1
    assert [each["held_bytes"] for each in half["ranks"]] == [6, 6]
    assert [each["chunks"] for each in half["ranks"]] == [1, 1]


def test_a_plan_reads_no_pack(root: Path) -> None:
    before = holdfast("inspect", root / STEP, "--plan", "fsdp=3", "--json").out
    for pack in (root / STEP).glob("*/*.safetensors"):
        pack.unlink()
    assert holdfast("inspect", root / STEP, "--plan", "fsdp=3", "--json").out == before


def test_a_mesh_that_is_none_is_refused_with_the_grammar(pristine: Path) -> None:
    ended = holdfast("inspect", pristine / STEP, "--plan", "fsdp")
    assert ended.status == 2
    assert ended.out == ""
    assert "'fsdp' is no mesh dimension; expected name=size[:placement]" in " ".join(ended.err.split())


def test_a_plan_of_many_ranks_is_cut_short_on_a_terminal_only(pristine: Path) -> None:
    shown = on_terminal("inspect", pristine / STEP, "--plan", "dp=100", columns=120)
    assert shown.status == 0
    assert "and 36 more ranks: --all shows them" in shown.out
    assert "more ranks" not in separately("inspect", pristine / STEP, "--plan", "dp=100").out
