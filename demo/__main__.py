"""`make demo`: a training run dies in the middle of a save and comes back on two ranks, three ranks and one process."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import holdfast
from demo.journal import Memory, Story, read
from demo.midsave import Leftover, committed_steps, kill_in_the_middle_of_a_save
from demo.proofs import Proofs, combined
from demo.ranks import Ranks, RunFailed

HOME = Path("runs/demo")
ROOT = HOME / "checkpoints"
STEPS = 20
SAVE_EVERY = 4
KILL_FROM_STEP = 12
"""The first save that may be killed, so that older checkpoints are there to fall back to."""

KILL_DELAYS_SECONDS = (0.03, 0.01, 0.0)
"""How long after a save's first file the kill comes; shorter each time a save was too quick for it."""

FIRST_SEED, OTHER_SEED = 1, 2


def main() -> int:
    """Run the demo; return the exit status."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(HOME, ignore_errors=True)
    ROOT.mkdir(parents=True)
    try:
        held = scenario()
    except RunFailed as failure:
        print(f"\n✗ {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; every rank was ended", file=sys.stderr)
        return 130
    print(f"\n{'All of it held' if held else 'NOT ALL OF IT HELD'}, in {time.monotonic() - began:.0f} s.")
    return 0 if held else 1


def scenario() -> bool:
    """Play the whole story; return whether every claim held."""
    proofs = Proofs()
    title(f"1. Reference: {STEPS} steps on 2 ranks, never interrupted, never saved")
    reference = play("reference", ranks=2, seed=FIRST_SEED, until=STEPS)

    title(f"2. The same run, saved every {SAVE_EVERY} steps, until SIGKILL takes all ranks in the middle of a save")
    leftover, saved = play_until_killed()
    newest = committed_steps(ROOT)[-1]
    path = ROOT / f"step-{newest:012d}"
    proofs.claim(
        f"SIGKILL in the middle of saving step {leftover.step}",
        newest < leftover.step,
        f"{leftover.written_bytes / 1e6:.0f} of {leftover.packs_bytes / 1e6:.0f} MB written, no manifest",
    )
    memory = saved[newest]
    verify(proofs, f"step {newest} is the newest and whole", path)

    title(f"3. Three ways back from step {newest}")
    print("  three ranks:")
    three = play("three-ranks", ranks=3, seed=OTHER_SEED, until=newest + 3, root=True, load=str(newest))
    print("  one plain process, no torch.distributed:")
    plain = play("plain", ranks=None, seed=OTHER_SEED, until=newest + 1, load=f"path:{path}")
    print("  two ranks, from the newest checkpoint to the end:")
    two = play("two-ranks", ranks=2, seed=OTHER_SEED, until=STEPS, root=True, load="newest", save_every=SAVE_EVERY)
    for name, story in (("2 ranks", two), ("3 ranks", three), ("1 process", plain)):
        proofs.same_tensors(f"{name}, right after loading", memory.digests, story.loaded.digests)
        proofs.same_values(f"{name}, right after loading", memory.values, story.loaded.values)
    proofs.same_losses("2 ranks", reference.losses, two.losses, range(newest + 1, STEPS + 1))
    proofs.same_tensors("2 ranks, at the end", reference.end.digests, two.end.digests)
    nothing_left(proofs, leftover.step)
    read_without_torch(proofs, path, memory.digests)
    verify(proofs, f"step {STEPS}, saved after the resume, is whole", ROOT / f"step-{STEPS:012d}")

    title(f"Digests of step {newest}: in memory when saved | 2 ranks | 3 ranks | 1 process")
    show_digests([memory, two.loaded, three.loaded, plain.loaded])
    title("Proven")
    held = proofs.show()
    title("Look for yourself")
    where = Path(sys.executable).parent.relative_to(Path.cwd()) if in_checkout() else Path(sys.executable).parent
    for command in (f"ls {ROOT}", f"inspect {path} --tensors 'model.blocks.0.*'", f"verify {path}"):
        print(f"  {where}/holdfast {command}")
    return held


def play(
    name: str, *, ranks: int | None, seed: int, until: int, root: bool = False, load: str = "none", save_every: int = 0
) -> Story:
    """Run to the end and return what the run told."""
    began = time.monotonic()
    journal = HOME / f"{name}.jsonl"
    arguments = run_arguments(journal, seed=seed, until=until, root=root, load=load, save_every=save_every)
    with Ranks(name, logs=HOME / "logs", count=ranks, arguments=arguments) as processes:
        processes.wait()
    print(f"    ended after {time.monotonic() - began:.0f} s", flush=True)
    return read(journal)


def play_until_killed() -> tuple[Leftover, dict[int, Memory]]:
    """Run, kill, and run again until a kill hit a save; return what it left and what was in memory at each save.

    Raises:
        RunFailed: Every save was quicker than the kill.
    """
    saved: dict[int, Memory] = {}
    for attempt, delay in enumerate(KILL_DELAYS_SECONDS):
        journal = HOME / f"killed-{attempt}.jsonl"
        done = committed_steps(ROOT)
        first = max(KILL_FROM_STEP, done[-1] + 1 if done else 0)
        arguments = run_arguments(
            journal, seed=FIRST_SEED, until=STEPS, root=True, load="newest", save_every=SAVE_EVERY
        )
        with Ranks(f"killed-{attempt}", logs=HOME / "logs", count=2, arguments=arguments) as processes:
            leftover = kill_in_the_middle_of_a_save(processes, ROOT, first_step=first, delay_seconds=delay)
        saved |= read(journal).saved
        if leftover is not None:
            print(f"    SIGKILL to all ranks while step {leftover.step} was being saved", flush=True)
            return leftover, saved
        if committed_steps(ROOT)[-1] + SAVE_EVERY > STEPS:
            break
        print("    the save had committed before the kill came: once more, sooner", flush=True)
    raise RunFailed("every save had committed before the kill came; nothing was proven about a save cut short")


def run_arguments(journal: Path, *, seed: int, until: int, root: bool, load: str, save_every: int) -> list[str]:
    """Return the arguments of `demo.rank`."""
    arguments = ["--journal", str(journal), "--seed", str(seed), "--until", str(until), "--load", load]
    arguments += ["--save-every", str(save_every)]
    return [*arguments, "--root", str(ROOT)] if root else arguments


def verify(proofs: Proofs, claim: str, path: Path) -> None:
    """Run `holdfast verify` as a person would and record what it says."""
    program = "import sys; from holdfast.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "verify", str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    words = (done.stdout + done.stderr).strip().splitlines() or ["(no output)"]
    proofs.claim(claim, done.returncode == 0, f"holdfast verify exits {done.returncode}: {words[-1][:70]}")


def read_without_torch(proofs: Proofs, path: Path, expected: dict[str, str]) -> None:
    """Read every tensor of a checkpoint in this process, which has no torch, and compare."""
    checkpoint = holdfast.open_checkpoint(str(path))
    found = {fqn: xxhash.xxh3_128_hexdigest(_bytes_of(checkpoint.read(fqn))) for fqn in checkpoint.tensors}
    assert "torch" not in sys.modules
    proofs.same_tensors("open_checkpoint, without torch", expected, found)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def nothing_left(proofs: Proofs, step: int) -> None:
    """Record whether the killed save's leftovers went when the resumed run committed."""
    attempts = [path for path in (ROOT / f"step-{step:012d}").iterdir() if path.is_dir() and path.name != "reports"]
    proofs.claim(
        f"step {step} committed anew, the dead save's files are gone",
        step in committed_steps(ROOT) and len(attempts) == 1,
        f"{len(attempts)} attempt folder(s)",
    )


def show_digests(moments: list[Memory]) -> None:
    """Print digests side by side: a few tensors, then all of them combined."""
    names = list(moments[0].digests)
    some = ("tokens.weight", "blocks.7.feed.2.weight", "norm.weight")
    for name in (name for name in names if name.partition(".")[2].removeprefix("state.").startswith(some)):
        print(f"  {name:<50} " + " ".join(moment.digests.get(name, "-")[:12] for moment in moments))
    print(f"  {f'all {len(names)} tensors':<50} " + " ".join(combined(moment.digests)[:12] for moment in moments))


def in_checkout() -> bool:
    """Return whether this interpreter lies inside the current folder."""
    return Path.cwd() in Path(sys.executable).parents


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
