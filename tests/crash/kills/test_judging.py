"""Two roots count as one content only where nothing but drawn names, digests of them and the clock differ."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.crash.kills.judging import EVERY, Judged, content_of
from tests.support.crashed_run import MANIFEST, OLD, committed_at, step_path


def test_runs_that_did_the_same_have_one_content_and_any_other_has_another(in_memory: Path) -> None:
    for name in ("one", "other"):
        committed_at(in_memory / name, OLD)
    assert content_of(in_memory / "one") == content_of(in_memory / "other")
    files = [path for path in step_path(in_memory / "one", OLD).rglob("*") if path.suffix != "" and path.is_file()]
    contents = set()
    for file in [path for path in files if path.parent.name != "reports"]:
        data = file.read_bytes()
        # Neither the first bytes of a file nor those before its digest vary between runs.
        for changed in (b"\0" + data[1:], data[:-100], data + b" ", None):
            if changed is None:
                file.unlink()
            else:
                file.write_bytes(changed)
            contents.add(content_of(in_memory / "one"))
            file.write_bytes(data)
    assert len(contents) == 4 * len([path for path in files if path.parent.name != "reports"])
    assert content_of(in_memory / "other") not in contents


def test_a_second_name_and_a_folder_without_files_count(in_memory: Path) -> None:
    committed_at(in_memory / "root", OLD)
    before = content_of(in_memory / "root")
    os.link(step_path(in_memory / "root", OLD) / MANIFEST, in_memory / "second")
    with_second = content_of(in_memory / "root")
    (in_memory / "root" / "empty").mkdir()
    assert len({before, with_second, content_of(in_memory / "root")}) == 3


def test_who_is_named_counts_though_names_are_drawn(in_memory: Path) -> None:
    for name, named in (("one", "a" * 16), ("same", "b" * 16), ("other", "c" * 16)):
        (in_memory / name).mkdir()
        (in_memory / name / "1").write_text(named)
        (in_memory / name / "2").write_text("d" * 16 if name == "other" else named)
    assert content_of(in_memory / "one") == content_of(in_memory / "same") != content_of(in_memory / "other")


def test_each_content_is_judged_once(in_memory: Path) -> None:
    judged, asked = Judged[str](), []

    def judge() -> str:
        asked.append(1)
        return "whole"

    committed_at(in_memory / "root", OLD)
    shutil.copytree(in_memory / "root", in_memory / "copy")
    assert {judged.fate(in_memory / name, "killed", judge) for name in ("root", "copy")} == {"whole"}
    assert judged.fate(in_memory / "root", "acknowledged", judge) == "whole"
    assert len(asked) == (3 if EVERY else 2)
