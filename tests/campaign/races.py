"""Eight processes race for one checkpoint: one wins, the others are told so, and the content is the winner's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import holdfast
from tests.distributed.stores.object_worker import RACERS
from tests.servers.server import Server

_SECONDS_OF_ROUND_MAX = 60


def raced(
    server: Server, folder: Path, *, rounds: int, say: Callable[[str], None] = lambda _: None
) -> tuple[Counter[str], str]:
    """Run races; return what was counted, and the URL of the checkpoints.

    Args:
        server: Where they save.
        folder: Gets the outcomes.
        rounds: How many.
        say: Is told how far it is.
    """
    url, counts = server.new_url(), Counter[str]()
    outcomes = folder / url.rpartition("/")[2]
    command = [sys.executable, "-m", "tests.distributed.stores.object_worker", "race", url, str(rounds), str(outcomes)]
    done = subprocess.run(
        command,
        env=os.environ | server.environment,
        capture_output=True,
        text=True,
        timeout=120 + rounds * _SECONDS_OF_ROUND_MAX,
    )
    print(done.stdout, done.stderr, sep="")
    assert done.returncode == 0, done.stderr
    came_to = [json.loads(Path(f"{outcomes}.{number}").read_text()) for number in range(RACERS)]
    for turn in range(rounds):
        came = [each[turn] for each in came_to]
        where = f"round {turn} of {url}"
        assert sorted(came) == ["ConflictError"] * (RACERS - 1) + ["won"], f"{where}: {came}"
        checkpoint = holdfast.open_checkpoint(f"{url}/{turn}", settings=server.settings())
        assert set(checkpoint.read("winner").tolist()) == {came.index("won")}, where
        counts["rounds with one winner, and its content"] += 1
        counts["losers with a ConflictError"] += RACERS - 1
        if (turn + 1) % 20 == 0:
            say(f"judged {turn + 1} of {rounds} races")
    return counts, url
