"""Someone copies the first lines of the README into a file and runs it twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def ran(script: Path) -> str:
    """Return what a script prints to standard error."""
    command = [sys.executable, script.name]
    ended = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_the_quick_start_is_a_whole_script_that_resumes(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 20
    script = tmp_path / "train.py"
    script.write_text(block[1])
    first = ran(script)
    assert "starting a new run at " in first
    saved = re.findall(r"step (\d+) saved: [\d.]+ \S+ in \S+ m?s \(training waited \S+ m?s\), loss=\d", first)
    assert saved == ["100", "200", "300"]
    second = ran(script)
    assert "step 300 loaded: " in second and "saved" not in second
